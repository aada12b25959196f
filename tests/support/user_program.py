"""A program as a user writes it, with the public names of the library: it is run, and checked by `mypy --strict`."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, Topology, attention, engine, explain, graphs, ops, update
from mpnn.round import Round
from mpnn.scores import Dot, Role

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing_extensions import assert_type

N = 12


def algebra() -> Graph:
    rule = graphs.causal() & graphs.window(2) | graphs.global_nodes(1)
    assert_type(rule, Topology)
    assert_type(rule - graphs.identity(), Topology)
    assert_type(~rule, Topology)
    graph = rule.bind(N)
    assert_type(graph, Graph)
    assert_type(graph & graphs.prefix(2), Graph)
    assert_type(graphs.prefix(2) & graph, Graph)
    assert_type(graph | graphs.strided(3), Graph)
    assert_type(graphs.strided(3) | graph, Graph)
    assert_type(graph - graphs.identity(), Graph)
    assert_type(graphs.complete() - graph, Graph)
    assert_type(~graph, Graph)
    assert_type(graph | ~graph, Graph)
    return graph & ~graphs.random(2, block=1, seed=0)


def builders() -> list[Graph]:
    x = torch.randn(N, 3)
    topologies: list[Topology] = [
        graphs.longformer(4, globals=1),
        graphs.bigbird(block=2, window=3, random=1, globals=1, seed=0),
        graphs.documents([5, 7]),
        graphs.permutation(range(N)),
        graphs.grid(3, 4, connectivity=4),
        graphs.neighborhood(3, 4, 1),
        graphs.windows(3, 4, 2, shift=1),
        graphs.expander(4, seed=0),
        graphs.parse("causal() & window(2)"),
    ]
    found = [topology.bind(N) for topology in topologies]
    found.append(graphs.memory(2).bind(N, N + 2))
    listed = graphs.from_edges([[0, 1], [1, 2]], N)
    return [
        *found,
        listed,
        graphs.from_edges([[0], [1]], num_src=2, num_dst=3, edge_attr=torch.ones(1, 2), edge_type=torch.tensor([0])),
        graphs.lsh(x, 4, rounds=2, seed=0),
        graphs.knn(x, 2),
        graphs.radius(x, 0.5),
        graphs.line_graph(listed),
        graphs.icosphere(0),
        graphs.chosen(torch.tensor([[0, 1], [1, -1]]), 3),
        graphs.blocks(torch.ones(2, 2, dtype=torch.bool), 2, 4),
        graphs.tree([-1, 0, 0]),
        graphs.rollouts(2, [1, 2]),
        graphs.batch([listed, listed]),
        graphs.from_scipy(graphs.to_scipy(listed)),
        graphs.from_networkx(graphs.to_networkx(listed)),
    ]


def of_a_graph(graph: Graph) -> None:
    assert_type(graph.num_src, int)
    assert_type(graph.num_dst, int)
    assert_type(graph.edge_index, Tensor)
    assert_type(graph.edge_attr, Tensor | None)
    assert_type(graph.dense(), Tensor)
    assert_type(graph.degree(), Tensor)
    assert_type(graph.reverse(), Graph)
    if graph.num_dst == graph.num_src:
        assert_type(graph.power(2), Graph)
        assert_type(graph.with_self_loops(), Graph)
        assert_type(graph.undirected(), Graph)
    assert_type(graph.to("cpu"), Graph)
    assert_type(graph.validate(), Graph)
    edges: int = graph.num_edges
    assert edges >= 0


def functions(graph: Graph) -> Tensor:
    q, k, v = torch.randn(3, N, 2, 4).unbind(0)
    out: Tensor = ops.attend(
        graph, q, k, v, bias=torch.zeros(graph.num_edges, 2), scale=0.5, softcap=5.0, sinks=torch.zeros(2), dropout=0.0
    )
    _, weights = ops.attend(graph, q, k, v, backend="auto", normalize="sigmoid", return_weights=True)
    assert weights.shape == (graph.num_edges, 2)
    nodes = ops.NodeBias(dst=torch.zeros(N, 2))
    out = out + ops.attend(graph, q, k, v, bias=nodes, normalize="softmax_dst")
    gate = -torch.rand(N, 2)
    _, state = ops.attend(
        graphs.causal().bind(N), q, k, v, normalize="none", log_gate=gate, beta=gate.exp(), return_state=True
    )
    assert state.shape == (2, 4, 4)
    assert_type(ops.aggregate(graph, q[:, 0], "mean", weight=torch.ones(graph.num_edges), backend="auto"), Tensor)
    return out


class Scaled(attention.Attention):
    """An attention as users write it, from the pieces of a round."""

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return Round(graph, src[..., None, :], Dot(dst[..., None, :], src[..., None, :], 0.5))


def layers(graph: Graph) -> None:
    x = torch.randn(N, 8)
    specs: list[attention.Attention] = [
        attention.DotProduct(8, 2, bias=True, dropout=0.1, edge_dim=None, position=None),
        attention.Additive(8, 4, heads=2),
        attention.AdditiveV2(8, 4, heads=2),
        attention.Degree(8, 8),
        attention.Kernel(8, 2),
    ]
    for spec in specs:
        operator: MessagePassing = MessagePassing(graph, "sum", None, spec)
        assert operator(x).shape == (N, 8)
    stack: nn.Module = MessagePassing(graphs.window(2), "mean", update.Add(), Scaled())
    y: Tensor = stack(x)
    print(explain(MessagePassing(graph, "sum", None, specs[0]), x))
    edges = MessagePassing(graph, "sum", None, None, edges=update.EdgeUpdate(8, 3))
    y, e = edges(x, edge_attr=torch.randn(graph.num_edges, 3))
    assert y.shape == (N, 3)
    assert e.shape == (graph.num_edges, 3)
    typed = attention.Typed(8, 8, 2)
    with_types = graphs.from_edges(graph.edge_index, N, edge_type=torch.zeros(graph.num_edges, dtype=torch.int64))
    assert MessagePassing(with_types, "sum", None, typed)(x).shape == (N, 8)
    q = torch.randn(N, 1, 4)
    result = engine.run(Round(graph, q, Dot(q, q, 0.5)), "auto")
    assert result is not None
    assert Role is not None


def flexible() -> None:
    from mpnn.flex import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    x = torch.randn(1, 2, N, 4)
    out: Tensor = flex_attention(x, x, x, None, create_block_mask(causal, None, None, N, N))
    assert out.shape == x.shape


def models() -> None:
    from mpnn.models import GPT

    model = GPT(vocabulary=5, dim=16, heads=2, layers=1, graph=graphs.causal(), context=8)
    logits: Tensor = model(torch.tensor([[0, 1, 2]]))
    assert logits.shape[-1] == 5
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
    if TYPE_CHECKING:  # their libraries are not part of this one
        import mpnn.hf
        import mpnn.pyg
        from mpnn.distributed import partition, sharded

        _: tuple[Callable[..., Any], ...] = (
            mpnn.hf.use,
            mpnn.pyg.use,
            mpnn.models.from_hf,
            mpnn.models.from_pyg,
            partition,
            sharded,
        )


def main() -> None:
    torch.manual_seed(0)
    graph = algebra()
    for one in builders():
        of_a_graph(one)
    functions(graph)
    layers(graph)
    flexible()
    models()


if __name__ == "__main__":
    main()
