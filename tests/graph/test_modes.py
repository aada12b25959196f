"""What a graph caches is built outside the modes of torch: it serves every later call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpnn import Graph, graphs, ops

X = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(0))

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "vmap": lambda f: torch.func.vmap(f)(X[None]),
}
GRAPHS: dict[str, Callable[[], Graph]] = {
    "edges": lambda: graphs.from_edges([[0, 1, 5, 5], [1, 2, 0, 0]], 6),
    "runs": lambda: graphs.window(1).bind(6),
    "cliques": lambda: graphs.documents([2, 4]).bind(6),
}


def attend(graph: Graph, x: Tensor) -> Tensor:
    return ops.attend(graph, x, x, x, backend="edge_list")


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("inside", [False, True], ids=["given", "made inside"])
def test_a_first_call_in_a_transform_leaves_a_graph_that_serves_plain_calls(
    transform: str, make: str, inside: bool
) -> None:
    graphs.cache.clear()
    made = [GRAPHS[make]()] if not inside else []

    def call(x: Tensor) -> Tensor:
        if not made:
            made.append(GRAPHS[make]())
        return attend(made[0], x)

    TRANSFORMS[transform](call)
    graph, fresh = made[0], GRAPHS[make]()._copy()
    assert torch.equal(attend(graph, X), attend(fresh, X))
    assert int(graph.token) != int(fresh.token)
    assert graph.csc.row.tolist() == fresh.csc.row.tolist()
