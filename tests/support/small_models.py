"""A small instance and a call of every model of `mpnn.models`, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpnn import graphs, models
from mpnn.models.text import sparse_transformer
from mpnn.models.text.reformer import Chunks

NODES, IN, CLASSES = 12, 6, 3
DRAW = torch.Generator().manual_seed(0)
EDGES = torch.randint(0, NODES, (2, 40), generator=DRAW)
PLAIN = graphs.from_edges(EDGES, NODES)
FEATURED = graphs.from_edges(EDGES, NODES, edge_attr=torch.rand(40, 3, generator=DRAW))
VISITED = graphs.from_edges(EDGES, NODES, edge_attr=torch.arange(40) % 5)
CLASSED = graphs.from_edges(EDGES, NODES, edge_type=torch.arange(40) % 3)
HALVES = graphs.from_edges(torch.stack([torch.arange(NODES), torch.arange(NODES) // 6]), num_src=NODES, num_dst=2)
MOLECULES = [graphs.grid(1, n).bind(n) for n in (3, 9)]
NEAR = models.intimate_subgraphs(PLAIN, 4)
X = torch.randn(NODES, IN, generator=DRAW)
IMAGES = torch.rand(2, 3, 16, 16, generator=DRAW)
TOKENS = torch.randint(3, 17, (2, 9), generator=DRAW)
PADDING = torch.arange(9) >= torch.tensor([[9], [5]])

BERT: dict[str, Any] = {"vocabulary": 17, "dim": 16, "layers": 2, "heads": 2, "hidden": 32, "context": 12}
GPT: dict[str, Any] = {"vocabulary": 17, "dim": 16, "layers": 2, "heads": 2, "context": 12}
SMALL = models.BertConfig(**BERT)
DELTA = models.DeltaNetConfig(17, 16, 2, 2, head_dim=8, value_dim=6, hidden=32, context=12)
MAMBA = models.Mamba2Config(17, 16, 2, head_dim=8, state=6, context=12)
RETNET = models.RetNetConfig(17, 16, 2, 2, hidden=32, context=12)
VIT: dict[str, Any] = {"image": 16, "patch": 4, "dim": 16, "layers": 2, "heads": 2, "hidden": 32}
PAINTER = {"decoder_dim": 16, "decoder_layers": 1, "decoder_heads": 2, "decoder_hidden": 16}
SWIN = models.SwinConfig(16, 2, dim=8, depths=(2, 2), heads=(2, 2), window=3)
HASHED = models.ReformerConfig(
    17, 16, ("local", "lsh"), 2, 8, 32, Chunks(4), Chunks(4), axial=(4, 4), axial_dims=(4, 12), seed=1, context=16
)
BOTH = models.TransformerConfig(
    17, dim=16, heads=2, hidden=32, encoder_layers=2, decoder_layers=2, context=12, attention_dropout=0.1
)

Make, Call = Callable[[], models.Model], Callable[[Any], Tensor]
EVERY: dict[str, tuple[Make, Call]] = {
    "ArrivalTimes": (lambda: models.ArrivalTimes(IN, 3, 8), lambda m: m(X, X[:, 0].abs(), FEATURED, HALVES)[1]),
    "Bert": (lambda: models.Bert(SMALL), lambda m: m(TOKENS, padding_mask=PADDING).pooled),
    "BigBird": (lambda: models.BigBird(SMALL, block=2), lambda m: m(TOKENS, padding_mask=PADDING).pooled),
    "Convolution": (lambda: models.Convolution(3, 5, 3, padding=1), lambda m: m(IMAGES)),
    "DeepNet": (lambda: models.DeepNet(models.GPTConfig(**GPT)), lambda m: m(TOKENS)),
    "DeltaNet": (lambda: models.DeltaNet(DELTA), lambda m: m(TOKENS)),
    "DistMult": (
        lambda: models.LinkPredictor(models.GCN(IN, 8), models.DistMult(8, 2)),
        lambda m: m(X, EDGES, PLAIN, torch.arange(40) % 2),
    ),
    "GAT": (lambda: models.GAT(IN, CLASSES), lambda m: m(X, PLAIN)),
    "GATv2": (lambda: models.GATv2(IN, CLASSES), lambda m: m(X, PLAIN)),
    "GCN": (lambda: models.GCN(IN, CLASSES), lambda m: m(X, PLAIN)),
    "GGNN": (lambda: models.GGNN(IN, CLASSES, relations=3), lambda m: m(X, CLASSED)),
    "GIN": (lambda: models.GIN(IN, CLASSES), lambda m: m(X, PLAIN, HALVES)),
    "GNN": (lambda: models.GNN(IN, CLASSES), lambda m: m(X, PLAIN)),
    "GPS": (lambda: models.GPS(IN, CLASSES, 16, 2, 2, walk=4), lambda m: m(X, PLAIN, [6, 6])),
    "GPT": (lambda: models.GPT(17, 16, 2, 2, context=12), lambda m: m(TOKENS)),
    "GPT2": (lambda: models.GPT2(models.GPTConfig(**GPT, norm_first=False)), lambda m: m(TOKENS)),
    "GraphBert": (lambda: models.GraphBert(IN, CLASSES), lambda m: m(X, NEAR)),
    "GraphNetwork": (lambda: models.GraphNetwork(IN, 3, 2, 2), lambda m: torch.cat(m(X, FEATURED))),
    "GraphSAGE": (lambda: models.GraphSAGE(IN, CLASSES), lambda m: m(X, PLAIN)),
    "GraphTransformer": (lambda: models.GraphTransformer(IN, CLASSES, edge_dim=3), lambda m: m(X, FEATURED)),
    "Graphormer": (lambda: models.Graphormer(IN, CLASSES, 0, 16, 2, 2), lambda m: m(X, MOLECULES)),
    "ImageClassifier": (lambda: models.ImageClassifier(models.Swin(SWIN), 3), lambda m: m(IMAGES)),
    "Inner": (lambda: models.LinkPredictor(models.GCN(IN, 8), models.Inner()), lambda m: m(X, EDGES, PLAIN)),
    "LinformerEncoder": (
        lambda: models.LinformerEncoder(models.LinformerConfig(**BERT, landmarks=4)),
        lambda m: m(TOKENS).pooled,
    ),
    "Llama": (lambda: models.Llama(models.LlamaConfig(**BERT, kv_heads=1)), lambda m: m(TOKENS)),
    "Longformer": (
        lambda: models.Longformer(SMALL, graphs.window(2)),
        lambda m: m(TOKENS, padding_mask=PADDING).pooled,
    ),
    "MAE": (lambda: models.MAE(models.MAEConfig(**VIT, **PAINTER)), lambda m: m(IMAGES, IMAGES[:, 0, 0]).pixels),
    "MAGNA": (lambda: models.MAGNA(IN, CLASSES, 16, 2, 2, relations=3), lambda m: m(X, CLASSED)),
    "MPNN": (lambda: models.MPNN(IN, 3, CLASSES, 16), lambda m: m(X, FEATURED, pool=HALVES)),
    "Mamba2": (lambda: models.Mamba2(MAMBA), lambda m: m(TOKENS)),
    "MaskedLM": (lambda: models.MaskedLM(models.Bert(SMALL, pooler=False)), lambda m: m(TOKENS, padding_mask=PADDING)),
    "MoNet": (lambda: models.MoNet(IN, CLASSES), lambda m: m(X, PLAIN)),
    "PNA": (lambda: models.PNA(IN, CLASSES, 16, 2, towers=2, edge_dim=3), lambda m: m(X, FEATURED, pool=HALVES)),
    "PairMLP": (lambda: models.LinkPredictor(models.GCN(IN, 8), models.PairMLP(8)), lambda m: m(X, EDGES, PLAIN)),
    "Performer": (lambda: models.Performer(models.PerformerConfig(**GPT, features=32)), lambda m: m(TOKENS)),
    "PerformerEncoder": (
        lambda: models.PerformerEncoder(models.PerformerEncoderConfig(**BERT, features=32)),
        lambda m: m(TOKENS, padding_mask=PADDING).pooled,
    ),
    "PinSage": (lambda: models.PinSage(IN, CLASSES), lambda m: m(X, VISITED)),
    "RGCN": (lambda: models.RGCN(IN, CLASSES, 3, bases=2), lambda m: m(X, CLASSED)),
    "ReformerLM": (lambda: models.ReformerLM(HASHED), lambda m: m(TOKENS, padding_mask=PADDING)),
    "RelationalMLP": (
        lambda: models.RelationalMLP(IN, CLASSES, 12, 2, nodes=6, graph=graphs.window(1)),
        lambda m: m(X),
    ),
    "RetNet": (lambda: models.RetNet(RETNET), lambda m: m(TOKENS)),
    "SentenceClassifier": (
        lambda: models.SentenceClassifier(models.Bert(SMALL), 3),
        lambda m: m(TOKENS, padding_mask=PADDING),
    ),
    "Seq2Seq": (lambda: models.Seq2Seq(17, 17, 8, 16), lambda m: m(TOKENS, TOKENS[:, :4], source_padding_mask=PADDING)),
    "SparseTransformer": (
        lambda: models.SparseTransformer(models.GPTConfig(**GPT), sparse_transformer.strided_patterns(3), "heads"),
        lambda m: m(TOKENS),
    ),
    "TSP": (
        lambda: models.TSP(16, 2, 2, 32),
        lambda m: m(X.view(3, 4, 6)[..., :2].sigmoid(), torch.arange(4).expand(3, 4)),
    ),
    "TokenClassifier": (
        lambda: models.TokenClassifier(models.Bert(SMALL, graphs.window(2), pooler=False), 3),
        lambda m: m(TOKENS, padding_mask=PADDING),
    ),
    "Transformer": (lambda: models.Transformer(BOTH), lambda m: m(TOKENS, TOKENS[:, :4], source_padding_mask=PADDING)),
    "TransformerXL": (lambda: models.TransformerXL(17, 16, 2, 2, remember=4), lambda m: m(TOKENS, m(TOKENS)[1])[0]),
    "VAIN": (lambda: models.VAIN(IN, CLASSES), lambda m: m(X)),
    "ViT": (lambda: models.ViT(models.ViTConfig(**VIT), graphs.neighborhood(4, 4, 1)), lambda m: m(IMAGES).pooled),
    "XLNet": (
        lambda: models.XLNet(models.XLNetConfig(17, 16, 2, 2, 32)),
        lambda m: m.predict(TOKENS, list(range(9)), (TOKENS > 9).long()),
    ),
}
