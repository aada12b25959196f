"""Every model of `mpnn.models`, small, with random inputs: the subjects of `test_metamorphic.py`.

Three tables, by the shape of what a model takes. `GRAPHS`: a `World`, several graphs side by side. `ROWS`: tensors
whose first dimension is a batch of sentences, images, tours or vectors. `CAUSAL`: tokens [B, N], of which position i
of the result may depend on tokens 0 to i only. A model can be in several tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpnn import MessagePassing, graphs, models, ops
from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph
from mpnn.models.text import sparse_transformer
from mpnn.models.text.reformer import Chunks
from mpnn.update import MLP, Add

IN, EDGE, TYPES, CLASSES = 6, 3, 3, 4
VOCABULARY, CONTEXT, DIM = 17, 16, 16

Outputs = dict[str, Tensor]
"""Results by what their first dimension counts: "nodes", "edges" or "graphs"."""


# --------------------------------------------------------------------------------------------- several graphs at once


@dataclass(frozen=True, eq=False)
class World:
    """Graphs side by side, of `sizes` nodes each, and everything that a model asks of their nodes and edges."""

    x: Tensor
    edges: Tensor
    attr: Tensor
    kind: Tensor
    sizes: tuple[int, ...]
    subgraphs: models.Subgraphs

    @staticmethod
    def draw(generator: torch.Generator, sizes: tuple[int, ...], degree: int) -> World:
        def draw(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=generator)

        total, starts = sum(sizes), [sum(sizes[:k]) for k in range(len(sizes))]
        edges = torch.cat([first + draw(n, 2, n * degree) for first, n in zip(starts, sizes, strict=True)], 1)
        edges = edges[:, torch.randperm(edges.shape[1], generator=generator)]
        count = edges.shape[1]
        near = torch.cat([first + draw(n, n, 4) for first, n in zip(starts, sizes, strict=True)])
        near[:, 0] = torch.arange(total)
        return World(
            torch.randn(total, IN, generator=generator),
            edges,
            torch.rand(count, EDGE, generator=generator),
            draw(TYPES, count),
            sizes,
            models.Subgraphs(near, draw(9, total, 4), draw(5, total, 4)),
        )

    def to(self, dtype: torch.dtype) -> World:
        return replace(self, x=self.x.to(dtype), attr=self.attr.to(dtype))

    @property
    def of_node(self) -> Tensor:
        """The graph of each node, int64 [N]."""
        return torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))

    @property
    def of_edge(self) -> Tensor:
        """The graph of each edge, int64 [E]."""
        return self.of_node[self.edges[1]]

    def relabeled(self, order: Tensor) -> World:
        """Node i of the result is node `order[i]`, int64 [N], which stays in its graph."""
        new, old = order.argsort(), self.subgraphs
        nodes = models.Subgraphs(new[old.nodes], old.roles, old.hops).of(order)
        return replace(self, x=self.x[order], edges=new[self.edges], subgraphs=nodes)

    def reordered(self, order: Tensor) -> World:
        """Edge i of the result is edge `order[i]`, int64 [E]."""
        return replace(self, edges=self.edges[:, order], attr=self.attr[order], kind=self.kind[order])

    def alone(self, k: int) -> World:
        """Graph k without the others."""
        node, edge, first = self.of_node == k, self.of_edge == k, sum(self.sizes[:k])
        near = self.subgraphs.of(node)
        return World(
            self.x[node],
            self.edges[:, edge] - first,
            self.attr[edge],
            self.kind[edge],
            (self.sizes[k],),
            models.Subgraphs(near.nodes - first, near.roles, near.hops),
        )

    def graph(self, **data: Any) -> Graph:
        return graphs.from_edges(self.edges, sum(self.sizes), **data)

    def plain(self) -> Graph:
        return self.graph()

    def featured(self) -> Graph:
        return self.graph(edge_attr=self.attr)

    def classed(self) -> Graph:
        return self.graph(edge_type=self.kind)

    def visited(self) -> Graph:
        return self.graph(edge_attr=1 + self.attr[:, 0])

    def pool(self) -> Graph:
        """Each graph attends to its nodes."""
        pairs = torch.stack([torch.arange(sum(self.sizes)), self.of_node])
        return graphs.from_edges(pairs, num_src=sum(self.sizes), num_dst=len(self.sizes))

    def molecules(self) -> list[Graph]:
        parts = [self.alone(k) for k in range(len(self.sizes))]
        return [part.featured() for part in parts]


class OnGraphs(NamedTuple):
    make: Callable[[], nn.Module]
    call: Callable[[Any, World], Outputs]


def nodes(name: str, *options: Any, over: Callable[[World], Graph] = World.plain, **more: Any) -> OnGraphs:
    """The usual form: `model(x, graph)` gives something of each node."""
    return OnGraphs(
        lambda: getattr(models, name)(IN, CLASSES, *options, **more), lambda m, w: {"nodes": m(w.x, over(w))}
    )


def nodes_and_graphs(make: Callable[[], nn.Module], over: Callable[[World], Graph]) -> OnGraphs:
    """`model(x, graph)` gives something of each node and, with `pool`, of each graph."""

    def call(model: Any, w: World) -> Outputs:
        return {"nodes": model(w.x, over(w)), "graphs": model(w.x, over(w), pool=w.pool())}

    return OnGraphs(make, call)


def links(decoder: Callable[[], nn.Module], *, typed: bool = False) -> OnGraphs:
    def call(model: Any, w: World) -> Outputs:
        return {"edges": model(w.x, w.edges, w.plain(), w.kind if typed else None)}

    return OnGraphs(lambda: models.LinkPredictor(models.GCN(IN, 8), decoder()), call)


def arrival_times(model: Any, w: World) -> Outputs:
    segments, routes = model(w.x, w.x[:, 0].abs(), w.featured(), w.pool())
    return {"nodes": segments, "graphs": routes}


def graph_network(model: Any, w: World) -> Outputs:
    of_nodes, of_edges = model(w.x, w.featured())
    return {"nodes": of_nodes, "edges": of_edges}


def graph_block(model: Any, w: World) -> Outputs:
    globals_of = ops.aggregate(w.pool(), w.x[..., :2])
    return dict(zip(("nodes", "edges", "graphs"), model(w.x, w.attr, globals_of, w.plain(), w.pool()), strict=True))


def graph_cast(model: Any, w: World) -> Outputs:
    """Nodes are the grid and the mesh."""
    return {"nodes": model(w.x, w.x, w.featured(), w.featured(), w.featured())}


def atoms(model: Any, w: World) -> Outputs:
    args = (w.x[:, 3] > 0).long(), w.x[:, :3], w.plain()
    return {"nodes": model(*args), "graphs": model(*args, w.pool())}


def without_loops(model: Any, w: World) -> Outputs:
    return atoms(model, replace(w, edges=w.edges[:, w.edges[0] != w.edges[1]]))


def of_kinds(model: Any, w: World) -> Outputs:
    """Two relations between nodes of one kind."""
    relations = {("node", name, "node"): w.graph() for name in ("to", "again")}
    return {"nodes": model({"node": w.x}, graphs.HeteroGraph(relations))["node"]}


def moving(model: Any, w: World) -> Outputs:
    return {"nodes": torch.cat(model(w.x, w.x[:, :3], w.plain()), 1)}


def temporal(model: Any, w: World) -> Outputs:
    return {"nodes": model(w.x, [w.featured()] * 2, [8 * w.attr[:, 0]] * 2)}


def events(model: Any, w: World) -> Outputs:
    """Edges are events; those of the first kind come before the others."""
    model.reset()
    for late in (False, True):
        chosen = (w.kind > 0) == late
        time = (16 * w.attr[:, 0]).long() + 16 * late
        model.observe(*w.edges[:, chosen], time[chosen], w.attr[chosen])
    memory, _ = model(torch.arange(sum(w.sizes)))
    return {"nodes": torch.cat([w.x, memory], -1)}


GRAPHS: dict[str, OnGraphs] = {
    "ArrivalTimes": OnGraphs(lambda: models.ArrivalTimes(IN, EDGE, 8), arrival_times),
    "DimeNet": OnGraphs(lambda: models.DimeNet(8, 2, 6, 3, 2, 6.0, 2, CLASSES), without_loops),
    "ComplEx": links(lambda: models.ComplEx(8, TYPES), typed=True),
    "DistMult": links(lambda: models.DistMult(8, TYPES), typed=True),
    "EGNN": OnGraphs(lambda: models.EGNN(IN, CLASSES, 8, 2), moving),
    "GAT": nodes("GAT"),
    "GATv2": nodes("GATv2"),
    "GCN": nodes("GCN"),
    "GGNN": nodes_and_graphs(lambda: models.GGNN(IN, CLASSES, 8, 3, TYPES), World.classed),
    "GIN": nodes_and_graphs(lambda: models.GIN(IN, CLASSES, 8, 3), World.plain),
    "GNN": nodes("GNN", 8),
    "GPS": OnGraphs(
        lambda: models.GPS(IN, CLASSES, DIM, 2, 2, walk=4), lambda m, w: {"graphs": m(w.x, w.plain(), w.sizes)}
    ),
    "GPSLayer": OnGraphs(
        lambda: models.GPSLayer(MessagePassing(None, "sum", Add(MLP(IN, IN))), IN, 2),
        lambda m, w: {"nodes": m(w.x, w.plain(), graphs.documents(list(w.sizes)))},
    ),
    "GraphBert": OnGraphs(lambda: models.GraphBert(IN, CLASSES), lambda m, w: {"nodes": m(w.x, w.subgraphs)}),
    "GraphBlock": OnGraphs(lambda: models.GraphBlock(IN, EDGE, 2, 8), graph_block),
    "GraphCast": OnGraphs(lambda: models.GraphCast(IN, IN, EDGE, CLASSES, 8, 1), graph_cast),
    "GraphNetwork": OnGraphs(lambda: models.GraphNetwork(IN, EDGE, CLASSES, 2, 8, 2), graph_network),
    "GraphPredictor": OnGraphs(
        lambda: models.GraphPredictor(models.GCN(IN, 8), 8, CLASSES),
        lambda m, w: {"graphs": m(w.x, w.plain(), w.pool())},
    ),
    "GraphSAGE": nodes("GraphSAGE", 8),
    "GraphTransformer": nodes("GraphTransformer", 4, 2, over=World.featured, edge_dim=EDGE),
    "Graphormer": OnGraphs(
        lambda: models.Graphormer(IN, CLASSES, EDGE, DIM, 2, 2), lambda m, w: {"graphs": m(w.x, w.molecules())}
    ),
    "HGT": OnGraphs(
        lambda: models.HGT({"node": IN}, CLASSES, [("node", "to", "node"), ("node", "again", "node")], 8, 2), of_kinds
    ),
    "Hetero": OnGraphs(
        lambda: models.Hetero({("node", "to", "node"): MessagePassing(None, "sum", Add(MLP(IN, IN)))}), of_kinds
    ),
    "Inner": links(models.Inner),
    "LightGCN": OnGraphs(lambda: models.LightGCN(2), lambda m, w: {"nodes": m(w.x, w.plain())}),
    "LinkPredictor": links(models.Inner),
    "LinkRanker": OnGraphs(
        lambda: models.LinkRanker("directed", models.Inner(), models.LightGCN(2), dim=8, in_dim=IN),
        lambda m, w: {"edges": m(w.x, w.edges, m.graph(w.edges, num_nodes=len(w.x)))},
    ),
    "MAGNA": nodes("MAGNA", DIM, 2, 2, relations=TYPES, over=World.classed),
    "MeshGraphNet": OnGraphs(
        lambda: models.MeshGraphNet(IN, EDGE, CLASSES, 8, 2), lambda m, w: {"nodes": m(w.x, w.featured())}
    ),
    "MPNN": nodes_and_graphs(lambda: models.MPNN(IN, EDGE, CLASSES, 8), World.featured),
    "MoNet": nodes("MoNet", 8),
    "PNA": nodes_and_graphs(
        lambda: models.PNA(IN, CLASSES, DIM, 2, towers=2, edge_dim=EDGE, average_log_degree=1.0), World.featured
    ),
    "PaiNN": OnGraphs(lambda: models.PaiNN(8, 2, 6, 6.0, 2, CLASSES), atoms),
    "PairMLP": links(lambda: models.PairMLP(8, 8)),
    "PinSage": nodes("PinSage", 8, over=World.visited),
    "RGCN": nodes("RGCN", TYPES, 8, bases=2, over=World.classed),
    "SchNet": OnGraphs(lambda: models.SchNet(8, 6, 2, 6, 6.0, 2, CLASSES), atoms),
    "TGAT": OnGraphs(lambda: models.TGAT(IN, CLASSES, 2, 2, 6, EDGE), temporal),
    "TGNMemory": OnGraphs(lambda: models.TGNMemory(1000, EDGE, 8, 6, "mean"), events),
    "VAIN": nodes("VAIN", 8),
}


# ----------------------------------------------------------------------------------------------- batches of anything


Rows = tuple[Tensor, ...]


class OnRows(NamedTuple):
    """`call(model, *rows)`: tensors [B, ...] -> [B, ...]."""

    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], Rows]
    call: Callable[..., Tensor]


def sentences(generator: torch.Generator, batch: int) -> Rows:
    """Tokens [B, N] and which places hold one."""
    length = int(torch.randint(5, 13, (), generator=generator))
    tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    lengths = torch.randint(2, length + 1, (batch, 1), generator=generator)
    return tokens, torch.arange(length) < lengths


def whole_sentences(generator: torch.Generator, batch: int) -> Rows:
    return sentences(generator, batch)[:1]


def with_padding(model: nn.Module, tokens: Tensor, token_mask: Tensor) -> Any:
    return model(tokens, padding_mask=~token_mask)


def pairs_of_sentences(generator: torch.Generator, batch: int) -> Rows:
    """Sources, which of their places hold tokens, and targets."""
    source, keep = sentences(generator, batch)
    return source, keep, whole_sentences(generator, batch)[0]


def images(generator: torch.Generator, batch: int) -> Rows:
    return (torch.rand(batch, 3, 16, 16, generator=generator),)


def images_and_noise(generator: torch.Generator, batch: int) -> Rows:
    return *images(generator, batch), torch.rand(batch, 16, generator=generator)


def vectors(generator: torch.Generator, batch: int) -> Rows:
    return (torch.randn(batch, DIM, generator=generator),)


def features(generator: torch.Generator, batch: int) -> Rows:
    return (torch.randn(batch, 7, DIM, generator=generator),)


def tours(generator: torch.Generator, batch: int) -> Rows:
    cities = torch.rand(batch, 7, 2, generator=generator)
    return cities, torch.stack([torch.randperm(7, generator=generator) for _ in range(batch)])


BERT: dict[str, Any] = {
    "vocabulary": VOCABULARY,
    "dim": DIM,
    "layers": 2,
    "heads": 2,
    "hidden": 2 * DIM,
    "context": CONTEXT,
}
GPT: dict[str, Any] = {"vocabulary": VOCABULARY, "dim": DIM, "layers": 2, "heads": 2, "context": CONTEXT}
SMALL = models.BertConfig(**BERT)
VIT: dict[str, Any] = {"image": 16, "patch": 4, "dim": DIM, "layers": 2, "heads": 2, "hidden": 2 * DIM}
PAINTER = {"decoder_dim": DIM, "decoder_layers": 1, "decoder_heads": 2, "decoder_hidden": DIM}
SWIN = models.SwinConfig(16, 2, dim=8, depths=(2, 2), heads=(2, 2), window=3)
REFORMER: dict[str, Any] = {
    "vocabulary": VOCABULARY,
    "dim": DIM,
    "heads": 2,
    "head_dim": 8,
    "hidden": 2 * DIM,
    "local": Chunks(4),
    "lsh": Chunks(4),
    "axial": (4, 4),
    "axial_dims": (4, 12),
    "context": CONTEXT,
    "seed": 1,
}
HASHED = models.ReformerConfig(layers=("local", "lsh"), **REFORMER)
CHUNKED = models.ReformerConfig(layers=("local", "local"), causal=True, **REFORMER)
BOTH = models.TransformerConfig(
    VOCABULARY, dim=DIM, heads=2, hidden=2 * DIM, encoder_layers=2, decoder_layers=2, context=CONTEXT
)
LINFORMER = models.LinformerConfig(**BERT, landmarks=4)
DELTA = models.DeltaNetConfig(VOCABULARY, DIM, 2, 2, head_dim=8, value_dim=6, hidden=2 * DIM, context=CONTEXT)
MAMBA = models.Mamba2Config(VOCABULARY, DIM, 2, head_dim=8, state=6, context=CONTEXT)
RETNET = models.RetNetConfig(VOCABULARY, DIM, 2, 2, hidden=2 * DIM, context=CONTEXT)
NSA = models.NSAConfig(VOCABULARY, DIM, 2, 2, 1, 8, 2 * DIM, CONTEXT, size=4, stride=2, block=4, top=3, window=3)
PERFORMER = models.PerformerConfig(**GPT, features=32)

ROWS: dict[str, OnRows] = {
    "Bert": OnRows(lambda: models.Bert(SMALL), sentences, lambda m, *rows: with_padding(m, *rows).last),
    "BigBird": OnRows(lambda: models.BigBird(SMALL, block=2), sentences, lambda m, *rows: with_padding(m, *rows).last),
    "Convolution": OnRows(lambda: models.Convolution(3, 5, 3, padding=1), images, lambda m, x: m(x)),
    "DeepNet": OnRows(lambda: models.DeepNet(models.GPTConfig(**GPT)), whole_sentences, lambda m, x: m(x)),
    "DeltaNet": OnRows(lambda: models.DeltaNet(DELTA), whole_sentences, lambda m, x: m(x)),
    "GPT": OnRows(lambda: models.GPT(VOCABULARY, DIM, 2, 2, context=CONTEXT), whole_sentences, lambda m, x: m(x)),
    "GPT2": OnRows(lambda: models.GPT2(models.GPTConfig(**GPT)), whole_sentences, lambda m, x: m(x)),
    "ImageClassifier": OnRows(lambda: models.ImageClassifier(models.Swin(SWIN), 3), images, lambda m, x: m(x)),
    "Linformer": OnRows(
        lambda: MessagePassing(graphs.complete(), "sum", None, models.Linformer(DIM, 2, length=7, landmarks=3)),
        features,
        lambda m, x: m(x),
    ),
    "LinformerEncoder": OnRows(lambda: models.LinformerEncoder(LINFORMER), whole_sentences, lambda m, x: m(x).last),
    "Llama": OnRows(lambda: models.Llama(models.LlamaConfig(**BERT, kv_heads=1)), whole_sentences, lambda m, x: m(x)),
    "Longformer": OnRows(
        lambda: models.Longformer(SMALL, graphs.window(2)), sentences, lambda m, *rows: with_padding(m, *rows).last
    ),
    "MAE": OnRows(
        lambda: models.MAE(models.MAEConfig(**VIT, **PAINTER)), images_and_noise, lambda m, *rows: m(*rows).pixels
    ),
    "MaskedLM": OnRows(
        lambda: models.MaskedLM(models.Bert(SMALL, pooler=False)), sentences, lambda m, *r: with_padding(m, *r)
    ),
    "Mamba2": OnRows(lambda: models.Mamba2(MAMBA), whole_sentences, lambda m, x: m(x)),
    "NSA": OnRows(lambda: models.NSA(NSA), whole_sentences, lambda m, x: m(x)),
    "Performer": OnRows(lambda: models.Performer(PERFORMER), whole_sentences, lambda m, x: m(x)),
    "PerformerEncoder": OnRows(
        lambda: models.PerformerEncoder(models.PerformerEncoderConfig(**BERT, features=32)),
        sentences,
        lambda m, *rows: with_padding(m, *rows).last,
    ),
    "Reformer": OnRows(lambda: models.Reformer(HASHED), sentences, lambda m, *rows: with_padding(m, *rows).last),
    "ReformerLM": OnRows(lambda: models.ReformerLM(HASHED), sentences, lambda m, *rows: with_padding(m, *rows)),
    "RelationalMLP": OnRows(
        lambda: models.RelationalMLP(DIM, CLASSES, 16, 2, nodes=8, graph=graphs.window(1)), vectors, lambda m, x: m(x)
    ),
    "SentenceClassifier": OnRows(
        lambda: models.SentenceClassifier(models.Bert(SMALL), 3), sentences, lambda m, *rows: with_padding(m, *rows)
    ),
    "RetNet": OnRows(lambda: models.RetNet(RETNET), whole_sentences, lambda m, x: m(x)),
    "Seq2Seq": OnRows(
        lambda: models.Seq2Seq(VOCABULARY, VOCABULARY, 8, DIM),
        pairs_of_sentences,
        lambda m, source, keep, target: m(source, target, source_padding_mask=~keep),
    ),
    "SparseTransformer": OnRows(
        lambda: models.SparseTransformer(models.GPTConfig(**GPT), sparse_transformer.strided_patterns(3), "heads"),
        whole_sentences,
        lambda m, x: m(x),
    ),
    "Swin": OnRows(lambda: models.Swin(SWIN), images, lambda m, x: m(x).last),
    "TSP": OnRows(lambda: models.TSP(DIM, 2, 2, 2 * DIM), tours, lambda m, *rows: m(*rows)),
    "TokenClassifier": OnRows(
        lambda: models.TokenClassifier(models.Bert(SMALL, graphs.window(2), pooler=False), 3),
        sentences,
        lambda m, *rows: with_padding(m, *rows),
    ),
    "Transformer": OnRows(
        lambda: models.Transformer(BOTH),
        pairs_of_sentences,
        lambda m, source, keep, target: m(source, target, source_padding_mask=~keep),
    ),
    "TransformerXL": OnRows(
        lambda: models.TransformerXL(VOCABULARY, DIM, 2, 2, remember=CONTEXT), whole_sentences, lambda m, x: m(x)[0]
    ),
    "ViT": OnRows(lambda: models.ViT(models.ViTConfig(**VIT)), images, lambda m, x: m(x).last),
    "XLNet": OnRows(
        lambda: models.XLNet(models.XLNetConfig(VOCABULARY, DIM, 2, 2, 2 * DIM)),
        whole_sentences,
        lambda m, x: m.predict(x, list(range(x.shape[1])), (x > 9).long()),
    ),
}


# ------------------------------------------------------------------------------------------------- one after the other


class Causal(NamedTuple):
    """`call(model, tokens)`: [B, N] -> [B, N, vocabulary]. `cached(model, pieces)`: the same, given the tokens piece by
    piece; None where the model keeps nothing. `bits`: whether tokens leave what comes before them as it is to the bit,
    or else up to rounding."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Tensor], Tensor]
    cached: Callable[[Any, list[Tensor]], Tensor] | None = None
    bits: bool = True


SOURCE = torch.arange(2, 8).expand(2, -1)
PADDING = torch.arange(6) >= torch.tensor([[6], [4]])


def with_cache(model: Any, pieces: list[Tensor]) -> Tensor:
    cache = KVCache(CONTEXT)
    return torch.cat([model(piece, cache=cache) for piece in pieces], 1)


def translated(model: Any, pieces: list[Tensor]) -> Tensor:
    cache, memory = KVCache(CONTEXT), model.encode(SOURCE, padding_mask=PADDING)
    return torch.cat([model.logits(model.decode(piece, memory, cache=cache).last) for piece in pieces], 1)


def aligned(model: Any, pieces: list[Tensor]) -> Tensor:
    memory = model.encode(SOURCE, padding_mask=PADDING)
    state, logits = memory.state, []
    for word in torch.cat(pieces, 1).unbind(1):
        step, state, _ = model.step(word, state, memory)
        logits.append(step)
    return torch.stack(logits, 1)


def remembered(model: Any, pieces: list[Tensor]) -> Tensor:
    memory, logits = None, []
    for piece in pieces:
        step, memory = model(piece, memory)
        logits.append(step)
    return torch.cat(logits, 1)


def whole(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens)


def of_source(model: Any, tokens: Tensor) -> Tensor:
    return model(SOURCE, tokens, source_padding_mask=PADDING)


CAUSAL: dict[str, Causal] = {
    "DeepNet": Causal(ROWS["DeepNet"].make, whole, with_cache),
    "DeltaNet": Causal(ROWS["DeltaNet"].make, whole, with_cache, bits=False),
    "GPT": Causal(ROWS["GPT"].make, whole, with_cache),
    "GPT2": Causal(ROWS["GPT2"].make, whole, with_cache),
    "Llama": Causal(ROWS["Llama"].make, whole, with_cache),
    "Mamba2": Causal(ROWS["Mamba2"].make, whole, with_cache, bits=False),
    "NSA": Causal(ROWS["NSA"].make, whole, with_cache, bits=False),
    "Performer": Causal(ROWS["Performer"].make, whole, with_cache, bits=False),
    "RetNet": Causal(ROWS["RetNet"].make, whole, with_cache, bits=False),
    "ReformerLM": Causal(lambda: models.ReformerLM(CHUNKED), whole),
    "Seq2Seq": Causal(ROWS["Seq2Seq"].make, of_source, aligned),
    "SparseTransformer": Causal(ROWS["SparseTransformer"].make, whole, with_cache),
    "Transformer": Causal(ROWS["Transformer"].make, of_source, translated),
    "TransformerXL": Causal(ROWS["TransformerXL"].make, lambda m, x: m(x)[0], remembered),
    "XLNet": Causal(ROWS["XLNet"].make, ROWS["XLNet"].call),
}
