"""torch_cluster's functions against all pairs, and against torch_cluster itself (marker `scatter`)."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn.integrations import pyg_lib, torch_cluster as ours


def distances(x: Tensor, y: Tensor, batch_x: Tensor | None, batch_y: Tensor | None) -> Tensor:
    """[M, N], inf between entries of a batch."""
    apart = torch.cdist(y.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")
    if batch_x is None or batch_y is None:
        return apart
    return apart.masked_fill(batch_y[:, None] != batch_x, torch.inf)


def rows(edges: Tensor, count: int) -> list[list[int]]:
    """The second ends of the edges of each first end."""
    return [edges[1, edges[0] == i].tolist() for i in range(count)]


def clouds(width: int, batched: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """30 points and 12 queries, in entries 0, 1 and 3 of a batch."""
    sizes = torch.tensor([0, 1, 3])
    x, y = torch.randn(30, width), torch.randn(12, width)
    if not batched:
        return x, y, None, None
    return x, y, sizes.repeat_interleave(10), sizes.repeat_interleave(4)


@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("k", [1, 4, 15])
def test_knn(k: int, width: int, batched: bool) -> None:
    """Also of more points than an entry has."""
    x, y, batch_x, batch_y = clouds(width, batched)
    apart = distances(x, y, batch_x, batch_y)
    order = apart.argsort(1)[:, : min(k, 10 if batched else 30)]
    found = ours.knn(x, y, k, batch_x, batch_y)
    assert rows(found, 12) == order.tolist()
    assert ours.knn(x, y, k, batch_x, batch_y, num_workers=2, batch_size=4).equal(found)
    ptrs = (None if b is None else torch.nn.functional.pad(b.bincount().cumsum(0), (1, 0)) for b in (batch_x, batch_y))
    assert pyg_lib.knn(x, y, k, *ptrs).equal(found)
    turned = torch.nn.functional.normalize
    by_angle = distances(turned(x), turned(y), batch_x, batch_y).argsort(1)[:, : order.shape[1]]
    if width > 1:  # on a line, all points of one side have the same direction
        assert rows(ours.knn(x, 7 * y, k, batch_x, batch_y, cosine=True), 12) == by_angle.tolist()


@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("loop", [False, True], ids=["", "loop"])
@pytest.mark.parametrize("k", [2, 12])
def test_knn_graph(k: int, loop: bool, batched: bool) -> None:
    x, _, batch, _ = clouds(3, batched)
    apart = distances(x, x, batch, batch)
    if not loop:
        apart.fill_diagonal_(torch.inf)
    most = 10 - (not loop) if batched else 30
    expected = apart.argsort(1)[:, : min(k, most)].tolist()
    edges = ours.knn_graph(x, k, batch, loop)
    assert rows(edges.flip(0), 30) == expected
    assert rows(ours.knn_graph(x, k, batch, loop, flow="target_to_source"), 30) == expected
    order = torch.randperm(30)  # entries need not be sorted
    shuffled = ours.knn_graph(x[order], k, None if batch is None else batch[order], loop)
    assert sorted(map(tuple, order[shuffled].t().tolist())) == sorted(map(tuple, edges.t().tolist()))


def test_coincident_points_are_neighbors_of_one_another() -> None:
    x = torch.zeros(7, 2)
    edges = ours.knn_graph(x, 3)
    assert torch.bincount(edges[1]).eq(3).all()
    assert (edges[0] != edges[1]).all()
    assert ours.radius_graph(x, 0.1).shape == (2, 42)
    assert sorted(ours.fps(x, ratio=1.0).tolist()) == list(range(7))
    assert ours.knn_graph(x[:2], 5).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
@pytest.mark.parametrize("r", [0.3, 1.0, 2.5])
def test_radius(r: float, batched: bool) -> None:
    x, y, batch_x, batch_y = clouds(3, batched)
    near = distances(x, y, batch_x, batch_y) < r
    assert ours.radius(x, y, r, batch_x, batch_y).equal(near.nonzero().t())
    apart = distances(x, x, batch_x, batch_x)
    for loop in (False, True):
        near = (apart < r) & (loop | ~torch.eye(30, dtype=torch.bool))
        assert ours.radius_graph(x, r, batch_x, loop, flow="target_to_source").equal(near.nonzero().t())
        assert ours.radius_graph(x, r, batch_x, loop).equal(near.nonzero().t().flip(0))
        ranks = apart.masked_fill(~near, torch.inf).argsort(1).argsort(1)
        kept = near & (ranks < 3)
        assert ours.radius_graph(x, r, batch_x, loop, 3).equal(kept.nonzero().t().flip(0))


def test_points_at_the_radius_are_outside() -> None:
    x = torch.tensor([0.0, 1.0, 3.0])
    assert ours.radius_graph(x, 1.0).shape == (2, 0)
    assert ours.radius_graph(x, 1.0001).tolist() == [[1, 0], [0, 1]]
    assert ours.radius_graph(x, 0.0, loop=True).shape == (2, 0)


def test_farthest_points() -> None:
    x = torch.tensor([[-1.0, -1], [-1, 1], [1, -1], [1, 1.5], [5, 5], [6, 5], [7, 5]])
    batch = torch.tensor([0, 0, 0, 0, 2, 2, 2])
    assert ours.fps(x, batch, 0.5, random_start=False).tolist() == [0, 3, 4, 6]
    assert ours.fps(x, batch, random_start=False).tolist() == [0, 3, 4, 6]
    assert ours.fps(x, ratio=0.5, random_start=False, ptr=[0, 4, 4, 7]).tolist() == [0, 3, 4, 6]
    assert ours.fps(x, ratio=torch.tensor([0.7, 0.1, 0.1]), random_start=False, batch=batch).tolist() == [0, 3, 1, 4]
    assert pyg_lib.fps(x, torch.tensor([0, 4, 7]), 0.25, False).tolist() == [0, 4]
    assert ours.fps(torch.rand(10, 3), ratio=0.1).shape == (1,)  # not 2: .1 * 10 is rounded
    starts = {int(ours.fps(x[:4], ratio=0.25)) for _ in range(200)}
    assert starts == {0, 1, 2, 3}
    torch.manual_seed(0)
    first = ours.fps(x, batch)
    torch.manual_seed(0)
    assert ours.fps(x, batch).equal(first)


def test_cells_of_a_grid() -> None:
    pos = torch.tensor([[0.0, 0.0], [11.0, 9.0], [2.0, 8.0], [2.0, 2.0], [8.0, 3.0]])
    size = torch.tensor([5.0, 5.0])
    assert ours.grid_cluster(pos, size).tolist() == [0, 5, 3, 0, 1]
    wider = ours.grid_cluster(pos, size, torch.tensor([-5.0, 0.0]), torch.tensor([19.0, 9.0]))
    assert wider.tolist() == [1, 8, 6, 1, 2]
    with pytest.raises(ValueError, match="size must have 2 numbers"):
        ours.grid_cluster(pos, size[:1])


@pytest.mark.parametrize("batched", [False, True], ids=["", "batched"])
def test_nearest(batched: bool) -> None:
    x, y, batch_x, batch_y = clouds(3, batched)
    expected = distances(y, x, batch_y, batch_x).argmin(1)
    assert ours.nearest(x, y, batch_x, batch_y).equal(expected)
    with pytest.raises(ValueError, match="Some batch indices occur in 'batch_x' that do not occur in 'batch_y'"):
        ours.nearest(x, y[:8], torch.arange(30) // 10, torch.arange(8) // 4)


def test_clusters_of_a_matching() -> None:
    row, col = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 2, 1])
    weight = torch.tensor([1.0, 1, 5, 5])
    found = {tuple(ours.graclus_cluster(row, col, weight).tolist()) for _ in range(100)}
    assert found == {(0, 1, 1), (0, 0, 2)}  # node 0 is first sometimes, and 1 is its only neighbor
    unweighted = {tuple(ours.graclus_cluster(row, col).tolist()) for _ in range(100)}
    assert unweighted == found
    assert ours.graclus_cluster(row, col, num_nodes=5)[3:].tolist() == [3, 4]
    ptr = torch.tensor([0, 1, 3, 4])
    assert {tuple(pyg_lib.graclus_cluster(ptr, col, weight).tolist()) for _ in range(100)} == found


def test_walks_go_along_edges() -> None:
    row, col = torch.tensor([2, 0, 1, 1, 3]), torch.tensor([1, 1, 2, 0, 3])
    start = torch.tensor([0, 1, 2, 3, 4]).repeat(200)
    nodes, edges = ours.random_walk(row, col, start, 5, num_nodes=5, return_edge_indices=True)
    order = (row * 5 + col).argsort()
    for k in range(5):
        walks = edges[:, k] >= 0
        taken = order[edges[walks, k]]
        assert row[taken].equal(nodes[walks, k])
        assert col[taken].equal(nodes[walks, k + 1])
        assert nodes[~walks, k].eq(4).all()
        assert nodes[~walks, k + 1].eq(4).all()
    assert nodes[:, 0].equal(start)
    second = nodes[nodes[:, 0] == 1, 1]
    assert 60 < int((second == 0).sum()) < 140  # of 200, each of two with probability .5
    ptr = torch.tensor([0, 1, 3, 4, 5, 5])
    torch.manual_seed(1)
    by_rows = pyg_lib.random_walk(ptr, torch.tensor([1, 0, 2, 1, 3]), start, 5, 1.0, 1.0)
    torch.manual_seed(1)
    assert by_rows.equal(ours.random_walk(row, col, start, 5, num_nodes=5))


def test_node2vec_weighs_steps() -> None:
    """A triangle 0, 1, 2 with a tail 3 at 1: from 0 to 1 a step goes back with 1 / p, to 2, a neighbor of 0, with 1,
    and to 3 with 1 / q."""
    pairs = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 3]]).t()
    row, col = torch.cat([pairs, pairs.flip(0)], 1)
    nodes = ours.random_walk(row, col, torch.zeros(40_000, dtype=torch.int64), 2, p=4.0, q=0.5)
    third = nodes[nodes[:, 1] == 1, 2]
    shares = torch.bincount(third, minlength=4) / len(third)
    weights = torch.tensor([1 / 4, 0.0, 1.0, 2.0])
    # 20,000 draws: three standard deviations are .011
    torch.testing.assert_close(shares, weights / weights.sum(), atol=0.011, rtol=0)


def test_other_dtypes_and_shapes() -> None:
    x = torch.arange(6)
    assert ours.knn_graph(x, 1).shape == (2, 6)
    assert ours.knn(x.half(), x.bfloat16(), 1)[1].equal(x)
    none = torch.zeros(0, 3)
    for found in (
        ours.knn(none, none, 2),
        ours.knn_graph(none, 2),
        ours.radius_graph(none, 1.0),
        ours.radius(none, none, 1.0),
    ):
        assert found.shape == (2, 0)
        assert found.dtype == torch.int64
    assert ours.fps(none).shape == (0,)
    assert ours.random_walk(x[:0], x[:0], x[:0], 3).shape == (0, 4)


def test_errors() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="flow must be 'source_to_target' or 'target_to_source'; got 'up'"):
        ours.knn_graph(x, 1, flow="up")
    with pytest.raises(ValueError, match=r"must have one number for each of 4 points; got \[3\]"):
        ours.knn_graph(x, 1, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="points must be finite"):
        ours.radius_graph(x / 0, 1.0)
    with pytest.raises(ValueError, match=r"points must be \[N, F\]; got \[4, 3, 1\]"):
        ours.knn(x[..., None], x, 1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        ours.radius_graph(x, 1.0, periodic=True)  # type: ignore[call-arg]


# ---------------------------------------------------------------------------------------------- torch_cluster itself


@pytest.mark.scatter
def test_signatures_are_torch_clusters() -> None:
    theirs = pytest.importorskip("torch_cluster")
    for name in (
        "knn",
        "knn_graph",
        "radius",
        "radius_graph",
        "fps",
        "grid_cluster",
        "graclus_cluster",
        "nearest",
        "random_walk",
    ):
        parameters = inspect.signature(getattr(theirs, name)).parameters.values()
        mine = inspect.signature(getattr(ours, name)).parameters.values()
        assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in parameters], name


@pytest.mark.scatter
@pytest.mark.parametrize("seed", range(60))
def test_functions_of_points_are_torch_clusters(seed: int) -> None:
    """Of equally near points either may be meant, so distances are compared."""
    theirs: Any = pytest.importorskip("torch_cluster")
    torch.manual_seed(seed)
    width, n, m = (
        int(torch.tensor(options)[torch.randint(len(options), ())])
        for options in ([1, 2, 3, 16], [1, 30, 200], [1, 7, 40])
    )
    x, y = torch.randn(n, width), torch.randn(m, width)
    batch_x, batch_y = (
        (None, None) if seed % 3 == 0 else (torch.randint(0, 3, (size,)).sort().values for size in (n, m))
    )

    def same(first: Tensor, second: Tensor, a: Tensor, b: Tensor) -> None:
        assert first.shape == second.shape
        assert first[0].equal(second[0])
        lengths = ((a[e[0]] - b[e[1]]).norm(dim=1) for e in (first, second))
        torch.testing.assert_close(*lengths, rtol=1e-5, atol=1e-6)

    for k in (1, 5):
        same(ours.knn(x, y, k, batch_x, batch_y), theirs.knn(x, y, k, batch_x, batch_y), y, x)
        for loop in (False, True):
            options = {"loop": loop, "flow": "target_to_source"}
            same(ours.knn_graph(x, k, batch_x, **options), theirs.knn_graph(x, k, batch_x, **options), x, x)
    for r in (0.3, 1.0):
        found, expected = (library.radius(x, y, r, batch_x, batch_y, 1000) for library in (ours, theirs))
        assert sorted(map(tuple, found.t().tolist())) == sorted(map(tuple, expected.t().tolist()))
        for loop in (False, True):
            found, expected = (library.radius_graph(x, r, batch_x, loop, 1000) for library in (ours, theirs))
            assert sorted(map(tuple, found.t().tolist())) == sorted(map(tuple, expected.t().tolist()))
    whole = (
        None if batch_x is None or bool((torch.bincount(batch_x) == 0).any()) else batch_x
    )  # theirs fails at empty entries
    for ratio in (0.1, 0.25, 1.0, None):
        assert ours.fps(x, whole, ratio, False).equal(theirs.fps(x, whole, ratio, False))
    size = torch.rand(width) + 0.3
    assert ours.grid_cluster(x, size).equal(theirs.grid_cluster(x, size))
    assert ours.grid_cluster(x, size, x.amin(0) - 1, x.amax(0)).equal(
        theirs.grid_cluster(x, size, x.amin(0) - 1, x.amax(0))
    )
    nearest, expected = (library.nearest(x, y) for library in (ours, theirs))
    torch.testing.assert_close((x - y[nearest]).norm(dim=1), (x - y[expected]).norm(dim=1))
