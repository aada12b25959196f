"""Models of PyTorch Geometric and transformers in place, on a GPU, compared with the same models before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contest import FORWARD, OURS, STEP, Case, Contest, Entry
from benchmarks.irregular import citations
from benchmarks.truth import Agreement

GROUP = "in place"
PYG, HF = "PyTorch Geometric", "transformers"


@dataclass(frozen=True)
class Shapes:
    """Args:
    graph: nodes and edges. decoder, encoder: sizes of a Llama and a BERT. length: of its prompts. long: of windows.
    window: their radius. new: tokens to generate. texts: how many, and the longest.
    """

    graph: tuple[int, int]
    decoder: tuple[tuple[str, int], ...]
    encoder: tuple[tuple[str, int], ...]
    length: int
    long: int
    window: int
    new: int
    texts: tuple[int, int]


DEFAULT = Shapes(
    graph=(169_343, 2_332_486),
    decoder=(
        *(("hidden_size", 1024), ("intermediate_size", 2816), ("num_hidden_layers", 8), ("num_attention_heads", 16)),
        *(("num_key_value_heads", 4), ("vocab_size", 32_000), ("max_position_embeddings", 16_384)),
    ),
    encoder=(  # those of MiniLM-L6
        *(("hidden_size", 384), ("num_hidden_layers", 6), ("num_attention_heads", 12), ("intermediate_size", 1536)),
    ),
    length=4096,
    long=16_384,
    window=512,
    new=32,
    texts=(128, 256),
)
SMALL = Shapes(
    graph=(60, 300),
    decoder=(
        *(("hidden_size", 32), ("intermediate_size", 64), ("num_hidden_layers", 2), ("num_attention_heads", 4)),
        *(("num_key_value_heads", 2), ("vocab_size", 100), ("max_position_embeddings", 512)),
    ),
    encoder=(("hidden_size", 32), ("num_hidden_layers", 2), ("num_attention_heads", 4), ("intermediate_size", 64)),
    length=32,
    long=64,
    window=8,
    new=3,
    texts=(5, 12),
)


def cases(shapes: Shapes, device: str) -> Iterator[Case]:
    for kind in ("GCN", "GraphSAGE", "GAT"):
        name = f"{kind}, 3 layers, {shapes.graph[0]:,} nodes, {shapes.graph[1]:,} edges, a training step"
        yield Case(GROUP, name, partial(_network, kind, shapes, device), (STEP,))
    length = shapes.length
    for name, make, direction in (
        (f"Llama, 2 prompts of {length}", _prompts, FORWARD),
        (f"Llama, 2 prompts of {length}, one padded to half", _padded, FORWARD),
        (f"Llama, 4 texts of {length // 4} packed into one", _packed, FORWARD),
        (f"Llama, {shapes.new} tokens after 2 prompts of {length // 8}", _generated, FORWARD),
        (f"Llama, a training step on {length} tokens", trained, STEP),
        (f"Mistral, window({shapes.window}), a prompt of {shapes.long}", _windowed, FORWARD),
        (f"BERT of MiniLM's shape, {shapes.texts[0]} texts of 8 to {shapes.texts[1]} tokens, padded", _texts, FORWARD),
    ):
        yield Case(GROUP, name, partial(make, shapes, device), (direction,))


def _contest(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], name: str, *answers: Any) -> Contest:
    """`answers`: what is compared instead of the results of the calls."""
    first, second = answers or (None, None)
    entries = [Entry(OURS, ours, answer=first), Entry(name, theirs, answer=second)]
    return Contest(entries, Agreement(), Agreement.description)


# ------------------------------------------------------------------------------------------------ PyTorch Geometric


def _network(kind: str, shapes: Shapes, device: str) -> Contest:
    import torch_geometric.nn

    import mpnn.pyg

    nodes, edges = shapes.graph
    index = citations(nodes, edges).edge_index.to(device)
    torch.manual_seed(0)
    options: dict[str, Any] = {"heads": 4} if kind == "GAT" else {}
    plain = getattr(torch_geometric.nn, kind)(128, 64 if kind == "GAT" else 256, 3, 40, **options).to(device)
    ours = deepcopy(plain)
    mpnn.pyg.use(ours)
    x = torch.randn(nodes, 128, device=device)

    def step(network: nn.Module) -> Tensor:
        loss = network(x, index).square().mean()
        loss.backward()
        network.zero_grad()
        return loss

    def results(network: nn.Module) -> Tensor:
        """The output, and the gradients of all weights."""
        with torch.enable_grad():
            out = network(x, index)
            gradients = torch.autograd.grad(out.square().mean(), list(network.parameters()))
        return torch.cat([out.flatten(), *(g.flatten() / g.abs().max().clamp(min=1e-12) for g in gradients)])

    answers = partial(results, ours), partial(results, plain)
    return _contest(partial(step, ours), partial(step, plain), PYG, *answers)


# ------------------------------------------------------------------------------------------------ transformers


def _models(shapes: Shapes, device: str) -> tuple[Any, Any, Tensor]:
    """A Llama in place, the same as it was, and two prompts."""
    ours, plain = _decoders("Llama", shapes.decoder, 0, device)
    return ours, plain, _tokens(shapes, (2, shapes.length), device)


@lru_cache(maxsize=1)
def _decoders(kind: str, size: tuple[tuple[str, int], ...], window: int, device: str) -> tuple[Any, Any]:
    import transformers

    import mpnn.hf

    options: dict[str, Any] = dict(size) | ({"sliding_window": window} if window else {})
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    with torch.device(device):
        plain = getattr(transformers, f"{kind}ForCausalLM")(config)
    plain = plain.to(torch.bfloat16 if device != "cpu" else torch.float32).eval()
    ours = deepcopy(plain)
    mpnn.hf.use(ours)
    return ours, plain


def _tokens(shapes: Shapes, size: tuple[int, ...], device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, dict(shapes.decoder)["vocab_size"], size, generator=generator).to(device)


def _prompts(shapes: Shapes, device: str) -> Contest:
    ours, plain, ids = _models(shapes, device)
    return _contest(lambda: ours(ids).logits, lambda: plain(ids).logits, HF)


def _padded(shapes: Shapes, device: str) -> Contest:
    ours, plain, ids = _models(shapes, device)
    mask = torch.ones_like(ids)
    mask[0, : shapes.length // 2] = 0
    real = mask.bool()

    def logits(model: Any) -> Tensor:
        return model(ids, attention_mask=mask).logits

    calls = partial(logits, ours), partial(logits, plain)
    return _contest(*calls, HF, lambda: logits(ours)[real], lambda: logits(plain)[real])


def _packed(shapes: Shapes, device: str) -> Contest:
    """Beside the same texts as a batch, which has no padding here."""
    ours, plain, ids = _models(shapes, device)
    packed = ids[:1]
    texts = packed.view(4, -1)
    positions = torch.arange(texts.shape[1], device=device).repeat(4)[None]
    return _contest(
        lambda: ours(packed, position_ids=positions, use_cache=False).logits,
        lambda: plain(texts, use_cache=False).logits.flatten(0, 1)[None],
        f"{HF}, the texts as a batch",
    )


def _generated(shapes: Shapes, device: str) -> Contest:
    ours, plain, ids = _models(shapes, device)
    prompt = ids[:, : shapes.length // 8]

    def tokens(model: Any) -> Tensor:
        return model.generate(prompt, max_new_tokens=shapes.new, do_sample=False, pad_token_id=0)

    contest = _contest(
        partial(tokens, ours), partial(tokens, plain), HF, lambda: ours(prompt).logits, lambda: plain(prompt).logits
    )
    contest.facts = {"tokens": float(shapes.new)}
    return contest


def trained(shapes: Shapes, device: str) -> Contest:
    ours, plain, ids = _models(shapes, device)
    text = ids[:1]

    def step(model: Any) -> Tensor:
        with torch.enable_grad():
            loss = model(text, labels=text).loss
            loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    answers = (lambda: ours(text, labels=text).loss.view(1)), (lambda: plain(text, labels=text).loss.view(1))
    return _contest(partial(step, ours), partial(step, plain), HF, *answers)


def _windowed(shapes: Shapes, device: str) -> Contest:
    ours, plain = _decoders("Mistral", shapes.decoder, shapes.window, device)
    ids = _tokens(shapes, (1, shapes.long), device)
    return _contest(lambda: ours(ids).logits, lambda: plain(ids).logits, HF)


def _texts(shapes: Shapes, device: str) -> Contest:
    from transformers import BertConfig, BertModel

    import mpnn.hf

    count, longest = shapes.texts
    torch.manual_seed(0)
    plain = BertModel(BertConfig(**dict(shapes.encoder))).to(device, torch.bfloat16 if device != "cpu" else None).eval()
    ours = deepcopy(plain)
    mpnn.hf.use(ours, unpad=True)
    lengths = torch.randint(8, longest, (count,), generator=torch.Generator().manual_seed(0)).to(device)
    words = torch.randint(5, 30_000, (count, longest), generator=torch.Generator().manual_seed(0)).to(device)
    mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
    real = mask.bool()

    def states(model: Any) -> Tensor:
        return model(words, attention_mask=mask).last_hidden_state

    return _contest(
        partial(states, ours), partial(states, plain), HF, lambda: states(ours)[real], lambda: states(plain)[real]
    )
