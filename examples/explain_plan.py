"""Which backend runs a layer, and why: the plan for several graphs and sizes, and an explicit backend that refuses.

By default, the plan selects the backend that supports the request and has the lowest estimated time. A backend that is
selected by name either runs or raises an error with the reason.

    python examples/explain_plan.py
    python examples/explain_plan.py --longest 1024     small graphs only
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology, explain
from mpnn.attention import Additive, DotProduct
from mpnn.engine.plan import Refused
from mpnn.graphs import bigbird, causal, complete, from_edges, window
from mpnn.update import Activate, FeedForward, PreNorm

DIM, HEADS = 64, 4


def layer(graph: Topology) -> MessagePassing:
    return MessagePassing(graph, "sum", PreNorm(DIM, FeedForward(DIM)), DotProduct(DIM, HEADS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=16_384, help="skip graphs with more nodes")
    options = parser.parse_args()

    sizes = [n for n in (1_024, 16_384) if n <= options.longest]
    for topology in (complete(), causal() & window(128), bigbird()):
        for n in sizes:
            heading(f"{topology}, {n:,} nodes")
            explain(layer(topology), torch.randn(n, DIM))

    citations = random_citations(2_000)
    gat = MessagePassing(citations, "sum", Activate(F.elu), Additive(DIM, 8, heads=8))
    x = torch.randn(2_000, DIM)
    heading("additive attention over citations")
    explain(gat, x)

    heading('the same, with backend="dense"')
    gat.backend = "dense"
    try:
        gat(x)
    except Refused as refusal:
        print(refusal)


def random_citations(papers: int) -> Graph:
    """Every paper attends to itself and to about five earlier ones."""
    torch.manual_seed(0)
    citing = torch.arange(1, papers).repeat_interleave(5)
    cited = (torch.rand(len(citing)) * citing).long()
    return from_edges(torch.stack([cited, citing]), papers).with_self_loops()


def heading(text: str) -> None:
    print(f"\n=== {text}")


if __name__ == "__main__":
    main()
