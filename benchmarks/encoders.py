"""A BERT of MiniLM's shape in place and as a model of this library, against transformers, ONNX Runtime and OpenVINO;
and what the machine allows.

Weights are random. ONNX Runtime runs the exported model after its own optimizer's fusions, OpenVINO as it is exported;
they need `pip install onnxruntime openvino onnx onnxscript`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks import measure, report, units
from benchmarks.contest import FORWARD, OURS, Bar, Case, Contest, Entry, Missing
from benchmarks.machine import multiply_in_cache
from benchmarks.truth import Agreement

TRANSFORMERS, ONNX, OPENVINO = "transformers, sdpa", "ONNX Runtime", "OpenVINO"
OWN_LAYERS = "mpnn.models.Bert"
INPUTS = (1, 16, False), (1, 128, False), (32, 16, False), (32, 128, False), (8, 512, False), (32, 128, True)
"""Texts, their tokens, and whether the texts have other lengths and are padded."""


def cases(small: bool) -> Iterator[Case]:
    for texts, tokens, padded in ((2, 8, True),) if small else INPUTS:
        title = f"MiniLM's shape, {texts} x {tokens} tokens{', padded' if padded else ''}"
        yield Case("workload", title, partial(_contest, texts, tokens, padded, small), (FORWARD,))


def _contest(texts: int, tokens: int, padded: bool, small: bool) -> Contest:
    import mpnn.hf
    from mpnn.models.published import load_weights
    from mpnn.models.text.bert import Bert, BertConfig

    peer = _model(small)
    ours = copy.deepcopy(peer)
    mpnn.hf.use(ours, unpad=True)
    ids = torch.randint(5, 1000, (texts, tokens))
    lengths = torch.randint(min(8, tokens), tokens + 1, (texts, 1)) if padded else torch.full((texts, 1), tokens)
    lengths[0] = tokens
    mask = (torch.arange(tokens) < lengths).long()
    kept = mask.bool()

    def entry(name: str, states: Callable[[], Tensor]) -> Entry:
        # States at padding are zeros here, and mean nothing elsewhere.
        return Entry(name, states, answer=lambda: states()[kept])

    def by_torch(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask).last_hidden_state

    sizes = peer.config
    own = Bert(
        BertConfig(
            sizes.vocab_size,
            sizes.hidden_size,
            sizes.num_hidden_layers,
            sizes.num_attention_heads,
            sizes.intermediate_size,
        ),
        pooler=False,
    )
    load_weights(own, peer.state_dict()).eval()

    def by_own_layers() -> Tensor:
        with torch.no_grad():
            return own(ids, padding_mask=~kept).last

    entries = [entry(OURS, partial(by_torch, ours)), entry(TRANSFORMERS, partial(by_torch, peer))]
    entries.append(entry(OWN_LAYERS, by_own_layers))
    left_out = []
    for name, package, build in ((ONNX, "onnxruntime", _by_onnx), (OPENVINO, "openvino", _by_openvino)):
        missing = [needed for needed in (package, "onnx", "onnxscript") if find_spec(needed) is None]
        if missing:
            left_out.append(Missing(name, f"pip install {' '.join(missing)}"))
            continue
        peer_states = build(small, torch.get_num_threads())
        entries.append(entry(name, partial(_as_tensor, peer_states, ids.numpy(), mask.numpy())))
    return Contest([*entries, *left_out], Agreement(), "each other's states", _bars(tokens))


def _as_tensor(states: Callable[..., NDArray[np.float32]], *inputs: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(states(*inputs))


def peak() -> float:
    """The operations a second of one thread of this processor in products whose matrices lie in the nearest cache."""
    work, least = 4e8, float("inf")
    for _ in range(200):
        start = time.process_time()
        multiply_in_cache(work, 64)
        least = min(least, time.process_time() - start)
    return work / least


def memory(small: bool) -> list[dict[str, Any]]:
    """How far a call raises the memory of this process, over what it must hold; the minimum of two calls.

    forward: of the model, over its output. layer: of one layer, its input counted, over its input and its output. step:
    of a forward and a backward pass, over the output, the gradients of the weights, and all that the forward saves.
    """
    import mpnn.hf

    rows = []
    for texts, tokens in ((2, 8),) if small else ((8, 128), (8, 512)):
        ids = torch.randint(5, 1000, (texts, tokens))
        for name in (OURS, TRANSFORMERS):
            model = copy.deepcopy(_model(small))
            if name == OURS:
                mpnn.hf.use(model)
            x = torch.randn(texts, tokens, model.config.hidden_size)
            forward, layer = partial(model, input_ids=ids), partial(model.encoder.layer[0], x)
            with torch.no_grad():
                raised = [_raised(call) for call in (forward, layer)]
            shares = {"forward": raised[0] / x.nbytes, "layer": (raised[1] + x.nbytes) / (2 * x.nbytes)}
            if texts * tokens <= 1024:
                must = x.nbytes + sum(weight.nbytes for weight in model.parameters()) + _saved(model, forward)
                shares["step"] = _raised(partial(_step, model, forward)) / must
            rows.append({"texts": texts, "tokens": tokens, "entry": name} | shares)
    return rows


def _raised(call: Callable[[], object]) -> float:
    call()
    return min(measure.peak(call) or float("nan") for _ in range(2))


def _step(model: nn.Module, forward: Callable[[], Any]) -> None:
    forward().last_hidden_state.square().sum().backward()
    model.zero_grad()


def _saved(model: nn.Module, forward: Callable[[], Any]) -> int:
    """The bytes that a forward pass saves for the backward pass, but for the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward()
    return sum(x.untyped_storage().nbytes() for place, x in saved.items() if place not in weights)


def _table_of_memory(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "This table has the peak of memory of a call, divided by the memory that the call must hold. A forward pass "
        "must hold its output; a layer, its input and its output; a training step, its output, the gradients, and the "
        "tensors that the forward pass saves. A layer of mpnn also holds the queries, keys and values of 512 tokens, "
        "or of one text if it is longer: 3 MB here, which is much for a small batch and little for a large one. "
        "Each program holds the input and the output of a layer during a forward pass, so the lowest possible number "
        "for a forward pass is 2.",
        "",
        "| texts x tokens | | forward | layer | step |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        shares = [f"{row[name]:.2f}" if name in row else "" for name in ("forward", "layer", "step")]
        lines.append(f"| {row['texts']} x {row['tokens']} | {row['entry']} | {' | '.join(shares)} |")
    return lines


def work(texts: int, tokens: int) -> float:
    """The multiplications and additions of all layers, over texts of full length."""
    width, layers = 384, 6
    return layers * texts * tokens * (2 * 12 * width * width + 4 * tokens * width)


def section(run: dict[str, Any]) -> list[str]:
    """The part of the page, with the minimum times."""
    lines = [
        "# Encoders on a CPU",
        "",
        "The model is a BERT of MiniLM's shape (6 layers, 384 wide, random weights, float32), on one thread. Times are "
        "processor times, the minimum of interleaved rounds, because other programs on the machine can only add time. "
        "The columns `in place` and `mpnn.models.Bert` are mpnn's. "
        f"{units.MEANING} The peer is the faster of ONNX Runtime and OpenVINO, and mpnn the faster of its two columns. "
        "`share of peak` is the rate of the multiplications of all layers in mpnn, divided by the rate of products of "
        "matrices in the nearest cache. If the share is 0.8, no program in float32 can be more than 1 / 0.8 times as "
        "fast.",
        "",
        *report._machine(run),
        f"- products in cache: {run['peak'] / 1e9:.1f} GFLOP/s",
        *([f"- {run['note']}"] if run.get("note") else []),
        "",
        f"| texts x tokens | in place | {OWN_LAYERS} | {TRANSFORMERS} | {ONNX} | {OPENVINO} | {units.RATIO} | "
        "share of peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row, run["peak"]) for row in run["rows"]]
    return lines + (_table_of_memory(run["memory"]) if run.get("memory") else [])


def _line(row: dict[str, Any], peak: float) -> str:
    least = {name: entry["least"] for name, entry in row.get("entries", {}).items() if "least" in entry}
    if OURS not in least:
        return f"| {row['case']} | {row.get('error') or row.get('skipped')} | | | | | | |"
    title = row["case"].split(", ", 1)[1].removesuffix(" tokens")
    ours = min(least[OURS], least[OWN_LAYERS])
    names = OURS, OWN_LAYERS, TRANSFORMERS, ONNX, OPENVINO
    shown = [report.duration(least[name]) if name in least else "" for name in names]
    others = [least[name] for name in (ONNX, OPENVINO) if name in least]
    faster = f"{min(others) / ours:.2f}" if others else ""
    padded = "padded" in title  # how long the texts are is drawn
    texts, tokens = (int(x) for x in title.split(" tokens")[0].split(" x "))
    share = "" if padded else f"{work(texts, tokens) / ours / peak:.2f}"
    return f"| {' | '.join([title.replace(' tokens', ''), *shown, faster, share])} |"


def _bars(tokens: int) -> list[Bar]:
    over_onnx = 1.7 if tokens <= 16 else 1.25
    return [
        Bar(f"faster than {TRANSFORMERS}", 1.0, "at most", FORWARD, TRANSFORMERS),
        Bar(f"at least {over_onnx} times faster than {ONNX}", over_onnx, "at least", FORWARD, ONNX),
    ]


@cache
def _model(small: bool) -> Any:
    import transformers as hf

    width, heads, layers = (64, 2, 2) if small else (384, 12, 6)
    config = hf.BertConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attn_implementation="sdpa",
    )
    return hf.BertModel(config, add_pooling_layer=False).eval()


class _States(nn.Module):
    """The model as ONNX takes it: tensors in, a tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states


@cache
def _exported(small: bool) -> Path:
    """The file of the model in ONNX, in a folder that goes with the process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name, "plain.onnx")
    sizes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    # Two tensors: one for both inputs would be exported as one input.
    example = torch.ones(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _States(_model(small)).eval(),
            example,
            str(path),
            input_names=["ids", "mask"],
            output_names=["states"],
            dynamic_shapes={"ids": sizes, "mask": sizes},
            dynamo=True,
        )
    return path


@cache
def _by_onnx(small: bool, threads: int) -> Callable[..., NDArray[np.float32]]:
    """ONNX Runtime's function of ids and mask, after its optimizer's fusions."""
    import onnxruntime
    from onnxruntime.transformers import optimizer

    config, plain = _model(small).config, _exported(small)
    fused = str(plain.with_name("fused.onnx"))
    optimizer.optimize_model(
        str(plain), model_type="bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=1
    ).save_model_to_file(fused)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(fused, options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: session.run(None, {"ids": ids, "mask": mask})[0]


@cache
def _by_openvino(small: bool, threads: int) -> Callable[..., NDArray[np.float32]]:
    """OpenVINO's function of ids and mask, in float32."""
    import openvino

    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(str(_exported(small)), "CPU", options)
    return lambda ids, mask: model([ids, mask])[0]
