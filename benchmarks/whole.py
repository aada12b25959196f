"""Whole training steps: a stack of GPT-2's layers against Hugging Face's, an epoch of GAT on Cora against PyG's, and
linear attention over long sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contest import BOTH, OURS, STEP, Bar, Case, Contest, Entry, Missing
from benchmarks.irregular import layer
from benchmarks.peers import unless_missing
from benchmarks.sizes import Sizes
from benchmarks.truth import Agreement, error, of_layer
from mpnn import Graph, MessagePassing, graphs
from mpnn.attention import DotProduct, Kernel
from mpnn.data import NodeClassification, cora, row_normalize
from mpnn.models import GAT
from mpnn.update import FeedForward, PreNorm

HF_GPT2, PYG_GAT = "HF GPT2Model, SDPA", "PyG GAT"


def cases(sizes: Sizes, backend: str) -> Iterator[Case]:
    dim = sizes.heads * sizes.width
    for dropout in (0.0, 0.1):
        name = f"GPT-2's shape, {sizes.layers} of 12 layers x {dim}, N {sizes.context}, dropout {dropout}"
        yield Case("model", name, partial(_gpt, sizes, dropout, backend), (BOTH,))
    yield Case("model", "GAT on Cora, an epoch", partial(_cora, backend), (STEP,))
    for features in (256, "elu"):
        for n in sizes.linear:
            make = partial(_linear, sizes, n, features, backend)
            series = f"causal Kernel, features={features!r}"
            yield Case("linear", f"{series}, N {n}", make, series=series, x="nodes")


# ------------------------------------------------------------------------------------------------ GPT-2


def _gpt(sizes: Sizes, dropout: float, backend: str) -> Contest:
    """The layers alone, on embeddings: what comes before and after them is the same for both."""
    dim = sizes.heads * sizes.width
    layers = [
        MessagePassing(
            graphs.causal(),
            "sum",
            PreNorm(dim, FeedForward(dim, activation=partial(nn.GELU, approximate="tanh")), dropout=dropout),
            DotProduct(dim, sizes.heads, dropout=dropout),
            backend=backend,
        )
        for _ in range(sizes.layers)
    ]
    stack = nn.Sequential(*layers, nn.LayerNorm(dim))
    x = torch.randn(1, sizes.context, dim).requires_grad_()
    ours = Entry(OURS, lambda: stack(x), (x, *stack.parameters()), module=stack)
    theirs = unless_missing(HF_GPT2, "transformers", partial(_hf_gpt2, sizes, dropout, x, layers))
    bars = [Bar(f"faster than {HF_GPT2}", 1.0, "at most", BOTH, HF_GPT2)]
    facts: dict[str, float] = {
        "nodes": sizes.context,
        "heads": sizes.heads,
        "width": sizes.width,
        "layers": sizes.layers,
    }
    return Contest(
        [ours, theirs], partial(_same_outputs, x, {}), "each other: outputs and gradients of features", bars, facts
    )


def _same_outputs(x: Tensor, known: dict[str, list[Tensor]], entry: Entry, direction: str) -> float:
    """Parameters are laid out differently, so gradients are compared for the features alone."""
    out = entry.call()
    same = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(out, [x], same)
    found = [out.detach(), gradient]
    expected = known.setdefault(direction, found)
    return max(
        error(entry.name, what, *both) for what, *both in zip(("output", "gradient"), found, expected, strict=True)
    )


def _hf_gpt2(sizes: Sizes, dropout: float, x: Tensor, layers: list[MessagePassing]) -> Entry:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=16,  # tokens are not embedded here
        bos_token_id=0,
        eos_token_id=0,
        n_positions=sizes.context,
        n_embd=sizes.heads * sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2Model(config).train()
    with torch.no_grad():
        model.wpe.weight.zero_()
        for block, ours in zip(model.h, layers, strict=True):
            _give_weights(block, ours)
    leaves = (x, *(p for name, p in model.named_parameters() if name != "wte.weight"))
    return Entry(HF_GPT2, lambda: model(inputs_embeds=x).last_hidden_state, leaves, module=model)


def _give_weights(block: nn.Module, ours: MessagePassing) -> None:
    """Their matrices are [in, out], and those of queries, keys and values stand side by side."""
    first, second = (m for m in ours.update.modules() if isinstance(m, nn.Linear))
    attention = ours.attention
    maps = (attention.to_query, attention.to_key, attention.to_value)
    block.attn.c_attn.weight.copy_(torch.cat([m.weight for m in maps]).T)
    block.attn.c_attn.bias.copy_(torch.cat([m.bias for m in maps]))
    for theirs, own in ((block.attn.c_proj, attention.to_out), (block.mlp.c_fc, first), (block.mlp.c_proj, second)):
        theirs.weight.copy_(own.weight.T)
        theirs.bias.copy_(own.bias)


# ------------------------------------------------------------------------------------------------ GAT on Cora


def _cora(backend: str) -> Contest:
    """An epoch is a step of Adam on all nodes. The bags of words are sparse, and our model may take them as such."""
    data = cora()
    x = row_normalize(data.x)
    graph = graphs.from_edges(data.edge_index, data.num_nodes).with_self_loops()
    model = GAT(x.shape[1], data.num_classes, graph=graph)
    for operator in model.layers:
        operator.backend = backend

    def logits(features: Tensor) -> Tensor:
        return model(features)

    entries: list[Entry | Missing] = [
        _epoch(f"{OURS}, sparse features", model, partial(logits, x.to_sparse()), data),
        _epoch(f"{OURS}, dense features", model, partial(logits, x), data),
        unless_missing(PYG_GAT, "torch_geometric", partial(_pyg_gat, model, x, graph, data)),
    ]
    bars = [Bar("at most a quarter of PyG's time", 0.25, "at most", STEP, PYG_GAT)]
    return Contest(entries, Agreement(), "each other's logits in evaluation", bars, {"edges": graph.num_edges})


def _epoch(name: str, model: nn.Module, logits: Callable[[], Tensor], data: NodeClassification) -> Entry:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

    def step() -> Tensor:
        loss = F.cross_entropy(logits()[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Entry(name, step, answer=torch.no_grad()(logits), module=model)


def _pyg_gat(model: GAT, x: Tensor, graph: Graph, data: NodeClassification) -> Entry:
    from torch_geometric.nn import GATConv

    first, last = (operator.attention for operator in model.layers)
    convs = nn.ModuleList(
        GATConv(
            ours.to_value.in_features, ours.by_src.shape[1], ours.heads, concat=ours.concat, dropout=0.6,
            add_self_loops=False,
        )
        for ours in (first, last)
    )  # fmt: skip
    with torch.no_grad():
        for conv, ours in zip(convs, (first, last), strict=True):
            conv.lin.weight.copy_(ours.to_value.weight)
            conv.att_src.copy_(ours.by_src[None])
            conv.att_dst.copy_(ours.by_dst[None])
            conv.bias.copy_(ours.bias)

    def logits() -> Tensor:
        hidden = F.elu(convs[0](F.dropout(x, 0.6, convs.training), graph.edge_index))
        return convs[1](F.dropout(hidden, 0.6, convs.training), graph.edge_index)

    return _epoch(PYG_GAT, convs, logits, data)


# ------------------------------------------------------------------------------------------------ linear attention


def _linear(sizes: Sizes, nodes: int, features: int | Literal["elu"], backend: str) -> Contest:
    heads, dim = 4, 4 * sizes.width
    spec = Kernel(dim, heads, features=features)
    op = MessagePassing(graphs.causal(), "sum", None, spec, backend=backend)
    x = torch.randn(nodes, dim).requires_grad_()
    entries: list[Entry | Missing] = [layer(op, x)]
    if nodes <= sizes.unit:
        softmax = MessagePassing(graphs.causal(), "sum", None, DotProduct(dim, heads))
        entries.append(replace(layer(softmax, x, "softmax attention (mpnn)"), checked=False))
    numbers = heads * (sizes.width if spec.directions is None else len(spec.directions))
    exact = of_layer(op, graphs.causal().bind(min(nodes, sizes.linear[0])), x, numbers)
    return Contest(entries, exact, exact.description, (), {"nodes": nodes, "heads": heads, "width": sizes.width})
