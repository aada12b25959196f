"""The nodes that a layer records for its backward pass on a GPU: one of this library, and those of torch's maps."""

import pytest
import torch
from row_cases import MARKS, TRITON, poisoned
from torch import Tensor

from mpnn import MessagePassing, graphs
from mpnn.attention import Additive, AdditiveV2, Attention, DotProduct
from mpnn.backends import csr, tiles
from mpnn.graph import Graph
from mpnn.graph.topology import Topology

__all__ = ["poisoned"]
pytestmark = MARKS
EDGES = graphs.from_edges(torch.randint(0, 9, (2, 30), generator=torch.Generator().manual_seed(0)), 9)
NODES = {
    # Most are views. The products of GAT are its map, and the product of all heads with both vectors.
    "GAT": (EDGES, Additive(16, 8, 2), 19),
    "GATv2": (EDGES, AdditiveV2(16, 8, 2), 9),
    "dot products": (EDGES, DotProduct(16, 2), 13),
    "a sum": (EDGES, None, 3),
    # Torch's maps of a batch have two views each.
    "a window": (graphs.window(2), DotProduct(32, 2), 21),
}


def recorded(out: Tensor) -> list[str]:
    """The names of the nodes behind a result, but for those of leaves."""
    found: dict[torch.autograd.graph.Node, None] = {}
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [following for following, _ in node.next_functions]
    return [node.name() for node in found if "AccumulateGrad" not in node.name()]


@pytest.mark.parametrize("name", NODES)
def test_a_layer_records_one_node_of_this_library(name: str) -> None:
    topology, attention, bound = NODES[name]
    names = recorded(output(topology, attention))
    ours = [node for node in names if not node.endswith(("Backward0", "Backward1"))]
    assert ours == ["_LaunchBackward"]
    assert len(names) <= bound, sorted(names)


def output(topology: Topology | Graph, attention: Attention | None) -> Tensor:
    """The message of a layer whose round runs as on a GPU."""
    device = TRITON.device
    op = MessagePassing(topology, "sum", None, attention).to(device)
    shape = (9, 16) if isinstance(topology, Graph) else (2, 20, 32)
    x = torch.randn(shape, device=device, requires_grad=True)
    (given,) = op.rounds(x, topology.to(device) if isinstance(topology, Graph) else None)
    ways = (csr.AGGREGATION if attention is None else csr.ATTENTION) if isinstance(topology, Graph) else tiles.WAYS
    out = ways["cuda"].run(given).out
    return out.flatten(-2) if op.attention is None else op.attention.merge(out)
