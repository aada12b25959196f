"""Models of transformers after `mpnn.hf.use` compared with the same models with torch's own attention (sdpa): whole
texts, hooks, masks of pairs, layers called one by one, decoding, a training step; and the first call of a process.

Weights are random and shared by both sides. `use` is meant to cost nothing, so the goal of each row is at most 1.02 of
sdpa's time, also where this library does not compute the call.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import measure, report, units
from benchmarks.contest import FORWARD, OURS, STEP, Bar, Case, Contest, Entry
from benchmarks.truth import Agreement

SDPA, EAGER = "transformers, sdpa", "transformers, eager"
LIMIT = 1.02  # of sdpa's time, and so the most that `use` may cost
GROUP, FIRST = "in place", "first call"
LLAMA = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2816}
"""A Llama of 594 MiB with its 32,000 words: what the first call and its memory are measured with."""

Call = Callable[[nn.Module], Tensor]
Model = tuple[str, dict[str, Any]]
"""The name of a class of transformers, and what its configuration has besides the defaults."""

BERT: Model = "BertModel", {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
BERT_BASE: Model = "BertModel", {"num_hidden_layers": 2}
GPT2: Model = "GPT2Model", {"n_layer": 6, "n_embd": 384, "n_head": 6}
DECODER = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1024}
LLAMA_OF_6: Model = "LlamaForCausalLM", {**DECODER, "num_hidden_layers": 6}
LLAMA_OF_12: Model = "LlamaModel", {**DECODER, "num_hidden_layers": 12}
IN_TURN = {"num_hidden_layers": 12, "layer_types": ["full_attention", "sliding_attention"] * 6, "sliding_window": 64}
QWEN: Model = "Qwen2Model", {**DECODER, **IN_TURN, "use_sliding_window": True}
MINISTRAL: Model = "MinistralModel", {**DECODER, **IN_TURN, "head_dim": 64}
MISTRAL: Model = "MistralForCausalLM", {**DECODER, "num_hidden_layers": 6, "sliding_window": 64}
T5: Model = "T5EncoderModel", {}
T5_WHOLE: Model = "T5ForConditionalGeneration", {}
CLIP: Model = "CLIPTextModel", {}


def cases(small: bool = False) -> Iterator[Case]:
    """A case for each kind of call; `small` leaves two layers of 64 features."""
    for title, model, call in CASES:
        yield Case(GROUP, title, partial(_contest, model, call, FORWARD, SDPA, small), (FORWARD,))
    # torch's own attention returns no weights, so transformers' formula is the peer.
    title, call = "MiniLM, 1 x 16, attentions", _over(1, 16, output_attentions=True)
    yield Case(GROUP, title, partial(_contest, BERT, call, FORWARD, EAGER, small), (FORWARD,))
    title, call = "BERT-base, 2 layers, 8 x 128, a training step with dropout", _over(8, 128)
    yield Case(GROUP, title, partial(_contest, BERT_BASE, call, STEP, SDPA, small), (STEP,))


def _contest(model: Model, call: Call, direction: str, name: str, small: bool) -> Contest:
    import mpnn.hf

    peer = build(model, small)
    ours = copy.deepcopy(peer)
    mpnn.hf.use(ours)
    peer.set_attn_implementation(name.removeprefix("transformers, "))

    def entry(name: str, module: nn.Module) -> Entry:
        def forward() -> Tensor:
            with torch.no_grad():
                return call(module)

        def step() -> Tensor:
            module.train()
            module.zero_grad()
            loss = call(module).square().mean()
            loss.backward()
            module.eval()
            return loss.detach()

        return Entry(name, step if direction == STEP else forward, answer=forward)

    bar = Bar(f"at most {LIMIT} x the time of {name}", LIMIT, "at most", direction, name)
    return Contest([entry(OURS, ours), entry(name, peer)], Agreement(), "each other's numbers", [bar])


def build(model: Model, small: bool = False) -> Any:
    """A model of random weights with 1,000 words and torch's attention, in evaluation mode."""
    import transformers

    name, options = model
    model_class = getattr(transformers, name)
    words = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if small:
        options = {**options, **_shrunk(model_class.config_class(), options)}
    config = model_class.config_class(**{**words, **options})
    config._attn_implementation = "sdpa"
    return model_class(config).eval()


def _shrunk(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of two layers of 64 features, by the names that this configuration has."""
    narrow = {"hidden_size": 64, "n_embd": 64, "d_model": 64, "d_kv": 16, "intermediate_size": 128, "d_ff": 128}
    narrow |= {"num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "num_decoder_layers": 2}
    narrow |= {"num_attention_heads": 4, "n_head": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    of_config = {name: value for name, value in narrow.items() if name in vars(config)}
    if "layer_types" in options:
        of_config["layer_types"] = options["layer_types"][:2]
    return of_config


# ------------------------------------------------------------------------------------------------ calls


def _ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(5, 1000, (batch, tokens), generator=torch.Generator().manual_seed(0))


def _over(batch: int, tokens: int, **options: Any) -> Call:
    """The states, or logits, of whole texts."""
    ids = _ids(batch, tokens)
    return lambda model: model(input_ids=ids, **options)[0]


def _hooked(batch: int, tokens: int) -> Call:
    """A hook on a module inside each layer, as interpretability has them."""
    ids = _ids(batch, tokens)
    seen: list[Tensor] = []

    def run(model: Any) -> Tensor:
        if not model.encoder.layer[0].output.dense._forward_hooks:
            for layer in model.encoder.layer:
                layer.output.dense.register_forward_hook(lambda module, inputs, out: seen.append(out))
        seen.clear()
        return model(input_ids=ids)[0]

    return run


def _masked_pairs(batch: int, tokens: int) -> Call:
    """A mask of pairs of tokens, [B, 1, N, N]."""
    ids = _ids(batch, tokens)
    place = torch.arange(tokens)
    pairs = ((place[:, None] - place).abs() <= tokens // 2).expand(batch, 1, -1, -1)
    return lambda model: model(input_ids=ids, attention_mask=pairs)[0]


def _loop(tokens: int, layers: int | None) -> Call:
    """A loop over the layers of a Llama that its user wrote, or its first layers alone."""
    ids = _ids(1, tokens)

    def run(model: Any) -> Tensor:
        h = model.embed_tokens(ids)
        rotary = model.rotary_emb(h, torch.arange(tokens)[None])
        for layer in model.layers[:layers]:
            h = layer(h, attention_mask=None, position_embeddings=rotary)
        return h

    return run


def _generate(batch: int, prompt: int, new: int, padded: bool = False) -> Call:
    """Greedy decoding, the prompt included. The tokens must be the same."""
    ids = _ids(batch, prompt)
    mask = torch.ones_like(ids)
    if padded:
        mask[1:, : prompt // 4] = 0
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return lambda model: model.generate(input_ids=ids, attention_mask=mask, **options).double()


WITHOUT_CACHE = {"use_cache": False}
CASES: Sequence[tuple[str, Model, Call]] = (
    ("MiniLM, 1 x 16", BERT, _over(1, 16)),
    ("MiniLM, 1 x 128", BERT, _over(1, 128)),
    ("MiniLM, 8 x 128", BERT, _over(8, 128)),
    ("MiniLM, 1 x 16, hooks inside layers", BERT, _hooked(1, 16)),
    ("MiniLM, 1 x 16, a mask of pairs", BERT, _masked_pairs(1, 16)),
    ("GPT-2, 6 layers of 384, 1 x 16", GPT2, _over(1, 16)),
    ("GPT-2, 6 layers of 384, 1 x 128", GPT2, _over(1, 128)),
    ("Llama, 6 layers of 384, 1 x 16", LLAMA_OF_6, _over(1, 16)),
    ("Llama, 6 layers of 384, 1 x 128", LLAMA_OF_6, _over(1, 128)),
    ("Llama, 12 layers called one by one, 1 x 16", LLAMA_OF_12, _loop(16, None)),
    ("Llama, its first layer alone, 1 x 16", LLAMA_OF_12, _loop(16, 1)),
    ("Llama, 6 layers, 4 texts with padding, 16 new tokens", LLAMA_OF_6, _generate(4, 32, 16, padded=True)),
    ("Qwen2, 12 layers, full and sliding in turn, 1 x 16", QWEN, _over(1, 16, **WITHOUT_CACHE)),
    ("Qwen2, 12 layers, full and sliding in turn, 1 x 128", QWEN, _over(1, 128, **WITHOUT_CACHE)),
    ("Ministral, 12 layers, 1 x 16", MINISTRAL, _over(1, 16)),
    ("Mistral, 6 layers, window of 64, 32 new tokens after 128", MISTRAL, _generate(1, 128, 32)),
    ("T5-small's encoder, 1 x 16", T5, _over(1, 16)),
    ("T5-small's encoder, 1 x 128", T5, _over(1, 128)),
    ("T5-small's encoder, 8 x 64", T5, _over(8, 64)),
    ("T5-small, 16 new tokens", T5_WHOLE, _generate(1, 16, 16)),
    ("CLIP's text tower, 8 x 77", CLIP, _over(8, 77)),
)


# ------------------------------------------------------------------------------------------------ the first call


def first_calls(small: bool = False, rounds: int = 3) -> list[dict[str, Any]]:
    """A row for the first call of a process over 1 x 16 tokens of a Llama of 594 MiB, and one for its second. Memory is
    how far both calls raise that of the process above the model's. Each round is a process of its own."""
    runs: dict[str, list[dict[str, float]]] = {OURS: [], SDPA: []}
    for _ in range(rounds):
        for name, found in runs.items():
            command = [sys.executable, "-m", "benchmarks.in_place", json.dumps({"name": name, "small": small})]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for title, key in (("first call", "first"), ("a later call", "later")):
        entries = {name: measure.summary([run[key] for run in found]) for name, found in runs.items()}
        for name, found in runs.items():
            if key == "first":
                entries[name]["peak_bytes"] = min(run["bytes"] for run in found)
        row = {"group": FIRST, "case": f"Llama of 594 MiB, 1 x 16, {title}", "direction": FORWARD, "series": ""}
        rows.append({**row, "x": "", "facts": {}, "ours": OURS, "entries": entries, "bars": []})
    return rows


def _first_call(name: str, small: bool) -> dict[str, float]:
    """Returns the measurements of one process: seconds of the first and of a later call, and bytes added by both."""
    torch.set_num_threads(1)
    model = build(("LlamaForCausalLM", {**LLAMA, "vocab_size": 32_000}), small)
    ids = _ids(1, 16)
    build(LLAMA_OF_6, True)(ids)  # what transformers and torch do once in a process
    if name == OURS:
        import mpnn.hf

        mpnn.hf.use(model)
    seconds = []

    def call() -> None:
        began = time.process_time()
        with torch.no_grad():
            model(ids)
        seconds.append(time.process_time() - began)

    def calls() -> None:
        for _ in range(4):
            call()

    return {"bytes": measure.peak(calls) or 0, "first": seconds[0], "later": min(seconds[1:])}


# ------------------------------------------------------------------------------------------------ the page


def section(results: dict[str, Any]) -> list[str]:
    """The part of the page: a line for each row, with the minimum times."""
    lines = [
        "# Models in place",
        "",
        f"`{results['command']}` measured models of transformers after `mpnn.hf.use`, compared with the same models "
        "with torch's own attention, sdpa (or eager, where attention weights are returned). Rows are inference in "
        "float32, unless they say otherwise. Times are processor times, the minimum of interleaved rounds. "
        f"{units.MEANING} The goal is at least {1 / LIMIT:.2f}. Memory is the peak that one call adds, and in the row "
        "of the first call the peak that four calls add.",
        "",
        *report._machine(results),
        "",
        f"| case | mpnn | transformers | {units.RATIO} | memory, mpnn | memory, transformers |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        entries = list(row.get("entries", {}).values())
        if len(entries) < 2 or "least" not in entries[1]:
            lines.append(f"| {row['case']} | {row.get('error') or row.get('skipped') or 'not compared'} | | | | |")
            continue
        ours, theirs = (entry["least"] for entry in entries)
        ratio = f"{theirs / ours:.2f}" if ours <= LIMIT * theirs else f"**{theirs / ours:.2f}**"
        room = [report.memory(entry["peak_bytes"]) if entry.get("peak_bytes") else "" for entry in entries]
        shown = [row["case"], report.duration(ours), report.duration(theirs), ratio, *room]
        lines.append(f"| {' | '.join(shown)} |")
    return lines


if __name__ == "__main__":
    print(json.dumps(_first_call(**json.loads(sys.argv[1]))))
