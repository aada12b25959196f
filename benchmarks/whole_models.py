"""Models of transformers and PyTorch Geometric as they are, and after `use`: the whole model, not its attention alone.

Weights are random. What is expected depends on the processor: linear maps are most of the time, and oneDNN computes
them twice as fast as MKL where this leaves AVX-512 unused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contest import FORWARD, OURS, STEP, Bar, Case, Contest, Entry
from benchmarks.truth import Agreement
from mpnn.update import maps

PEER, PYG = "transformers, sdpa", "PyG"
LAYERS = 4
NOT_SLOWER = 0.95  # to within the differences of interleaved runs
BARS = {
    "slow, AVX-512": {512: (2.1, 1.85), 2048: (2.2, 2.0)},
    "slow, AVX2": {512: (1.12, 1.08), 2048: (1.25, 1.2)},
    "quick": dict.fromkeys((512, 2048), (NOT_SLOWER, NOT_SLOWER)),
}
"""How many times faster, forward and in a step, up to this many tokens, by how quick torch's own products are."""


def torch_products() -> str:
    """How quick torch's products are: those of MKL leave AVX-512 unused on processors of AMD."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if maps.is_useful():
        return "slow, AVX-512" if wide else "slow, AVX2"
    return "quick" if wide else "slow, AVX2"


def cases(small: bool) -> Iterator[Case]:
    sizes = ((2, 16), (1, 32)) if small else ((8, 128), (1, 512), (1, 2048))
    for name in ("BERT", "Llama", "GPT-2"):
        for batch, tokens in sizes:
            for direction, kind in ((FORWARD, "forward"), (STEP, "a step")):
                title = f"{name}'s layers, {LAYERS} of 768, {batch} x {tokens:,} tokens, {kind}"
                yield Case("workload", title, partial(_text, name, batch, tokens, direction, small), (direction,))
    images = 1 if small else 8
    title = f"ViT-base's layers, {LAYERS} of 768, {images} images"
    yield Case("workload", title, partial(_images, images, small), (FORWARD,))
    nodes = 200 if small else 20_000
    yield Case("workload", f"GAT, a step over {nodes:,} nodes of 1,433 dense features", partial(_gat, nodes), (STEP,))


def _text(name: str, batch: int, tokens: int, direction: str, small: bool) -> Contest:
    ids = torch.randint(0, 1000, (batch, tokens))
    limit = BARS[torch_products()][512 if tokens <= 512 else 2048][direction == STEP]
    return _contest(partial(_model, name, small), lambda model: model(ids)[0], direction, limit)


def _images(count: int, small: bool) -> Contest:
    pixels = torch.randn(count, 3, 224, 224)
    limit = BARS[torch_products()][512][0]
    return _contest(partial(_model, "ViT", small), lambda model: model(pixels)[0], FORWARD, limit)


def _contest(build: Callable[[], Any], run: Callable[[Any], Tensor], direction: str, limit: float) -> Contest:
    import mpnn.hf

    peer = build().eval()
    ours = copy.deepcopy(peer)
    mpnn.hf.use(ours)

    def entry(name: str, model: nn.Module) -> Entry:
        def forward() -> Tensor:
            with torch.no_grad():
                return run(model)

        def step() -> Tensor:
            model.zero_grad()
            loss = run(model).square().mean()
            loss.backward()
            return loss.detach()

        return Entry(name, step if direction == STEP else forward, answer=forward)

    bars = [Bar(f"at least {limit} times faster than {PEER}", limit, "at least", direction, PEER)]
    return Contest([entry(OURS, ours), entry(PEER, peer)], Agreement(), "each other's states", bars)


def _model(name: str, small: bool) -> Any:
    import transformers as hf

    wide, heads = (64, 4) if small else (768, 12)
    sizes = {"hidden_size": wide, "num_hidden_layers": LAYERS, "num_attention_heads": heads}
    long = {"vocab_size": 1000, "max_position_embeddings": 2048, "attn_implementation": "sdpa"}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 4 * wide}
    if name == "BERT":
        return hf.BertModel(hf.BertConfig(**sizes, **long, **no_dropout), add_pooling_layer=False)
    if name == "Llama":
        return hf.LlamaModel(hf.LlamaConfig(**sizes, **long, intermediate_size=2048 * wide // 768))
    if name == "GPT-2":
        shape = {"n_embd": wide, "n_layer": LAYERS, "n_head": heads, "n_positions": 2048, "vocab_size": 1000}
        return hf.GPT2Model(hf.GPT2Config(**shape, attn_implementation="sdpa"))
    return hf.ViTModel(hf.ViTConfig(**sizes, **no_dropout, attn_implementation="sdpa"), add_pooling_layer=False)


def _gat(nodes: int) -> Contest:
    """Two layers, 8 heads x 8 and 1 x 7, as on Cora, in place."""
    x, edges, y = torch.randn(nodes, 1433), torch.randint(nodes, (2, 5 * nodes)), torch.randint(7, (nodes,))

    def both() -> tuple[Entry, Entry]:
        from torch_geometric.nn import GATConv

        import mpnn.pyg

        peer = nn.ModuleList([GATConv(1433, 8, 8), GATConv(64, 7, 1)])
        ours = copy.deepcopy(peer)
        mpnn.pyg.use(ours)
        return entry(OURS, ours), entry(PYG, peer)

    def entry(name: str, convs: nn.ModuleList) -> Entry:
        def logits() -> Tensor:
            return convs[1](F.elu(convs[0](x, edges)), edges)

        def step() -> Tensor:
            convs.zero_grad()
            loss = F.cross_entropy(logits(), y)
            loss.backward()
            return loss.detach()

        return Entry(name, step, answer=torch.no_grad()(logits))

    ours, peer = both()
    bars = [Bar(f"faster than {PYG}", 1.0, "at most", STEP, PYG)]
    return Contest([ours, peer], Agreement(), "each other's logits", bars, {"nodes": nodes})
