"""Models of atoms: SchNet and DimeNet++ with the weights of PyTorch Geometric, EGNN and PaiNN against their formulas
written out, all under rotations and translations, and forces that train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from error_bound import error_bound
from torch import Tensor, nn

from mpnn import Graph, graphs
from mpnn.attention import EdgeFilter
from mpnn.models import EGNN, DimeNet, PaiNN, SchNet
from mpnn.models.graph.dimenet import bessel_zeros
from mpnn.models.layers.molecules import forces

SYSTEM = "SchNet, EGNN, PaiNN, DimeNet++"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
N, CUTOFF = 12, 1.6


def molecules(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Graph, Graph]:
    """Types, positions, neighbors and the molecule of each atom; the last atom is alone."""
    types, positions = torch.randint(1, 4, (N,)), 2 * torch.rand(N, 3, dtype=dtype)
    positions[-1] += 9
    of_atom = torch.tensor([0] * 7 + [1] * 5)
    pool = graphs.from_edges(torch.stack([torch.arange(N), of_atom]), num_src=N, num_dst=2)
    return types, positions.requires_grad_(), graphs.radius(positions, CUTOFF, labels=of_atom), pool


def turned(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Positions after a random rotation and translation, and the rotation."""
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=positions.dtype))
    return positions @ rotation.T + torch.randn(3, dtype=positions.dtype), rotation


def of_pyg(ours: SchNet, theirs: Any) -> None:
    """Copies PyTorch Geometric's weights."""
    pairs: list[tuple[nn.Module, nn.Module]] = [(ours.embed, theirs.embedding)]
    pairs += [(ours.head[0], theirs.lin1), (ours.head[2], theirs.lin2)]
    for layer, block in zip(ours.layers, theirs.interactions, strict=True):
        attention = layer.attention
        pairs += [(attention.filter.network, block.mlp), (attention.value, block.conv.lin1)]
        pairs += [(attention.out[0], block.conv.lin2), (attention.out[2], block.lin)]
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())
    # constants that it rounds to float32
    theirs.distance_expansion.offset = ours.basis.centers
    theirs.distance_expansion.coeff = -0.5 / ours.basis.delta**2
    for module in theirs.modules():
        if hasattr(module, "shift"):
            module.shift = math.log(2)


@DTYPES
def test_schnet_is_that_of_pyg(dtype: torch.dtype, measured: Callable[..., None]) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    types, positions, graph, pool = molecules(dtype)

    def neighbors(at: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        src, dst = graph.edge_index
        return graph.edge_index, (at[src] - at[dst]).norm(dim=-1)

    theirs = pyg.SchNet(8, 6, 2, 10, CUTOFF, interaction_graph=neighbors).to(dtype)
    ours = SchNet(8, 6, 2, 10, CUTOFF).to(dtype)
    of_pyg(ours, theirs)
    results = []
    for energy in (ours(types, positions, graph, pool), theirs(types, positions, pool.edge_index[1])):
        force = forces(energy, positions, create_graph=True)
        results.append((energy, force, *torch.autograd.grad(force.square().sum(), positions)))
    for found, expected in zip(*results, strict=True):
        scale = expected.abs().max().clamp(min=1).item()
        error = (found - expected).abs().max().item() / scale
        measured(SYSTEM, "PyTorch Geometric SchNet", error, error_bound(12, 40, dtype))


def dimenet() -> DimeNet:
    """With heads that are not 0, as they are at first."""
    model = DimeNet(8, 2, 6, 4, 3, CUTOFF)
    for head in model.heads:
        nn.init.normal_(head.f[-1].weight)
    return model


def dimenet_of_pyg(ours: DimeNet, theirs: Any) -> None:
    """Copies PyTorch Geometric's weights."""
    block, edges = theirs.emb, ours.embed_edge
    of_dst, of_src, of_edge = block.lin.weight.chunk(3, 1)
    pairs = [(ours.embed, block.emb), (ours.embed_distance[0], block.lin_rbf)]
    with torch.no_grad():
        ours.basis.frequency.copy_(theirs.rbf.freq)
        edges.of_dst.bias.copy_(block.lin.bias)
        for own, weight in ((edges.of_dst, of_dst), (edges.of_src, of_src), (edges.of_edge, of_edge)):
            own.weight.copy_(weight)
    for layer, block in zip(ours.layers, theirs.interaction_blocks, strict=True):
        attention, update = layer.round.attention, layer.round.update
        pairs += [(layer.of_source, block.lin_kj), (layer.down, block.lin_down), (attention.out[0], block.lin_up)]
        pairs += [(layer.radial[0], block.lin_rbf1), (layer.radial[1], block.lin_rbf2)]
        pairs += [(attention.filter[0], block.lin_sbf1), (attention.filter[1], block.lin_sbf2)]
        pairs += [(update.own, block.lin_ji), (update.next, block.lin)]
        for own, other in zip(update.pairs, [*block.layers_before_skip, *block.layers_after_skip], strict=True):
            pairs += [(own[0], other.lin1), (own[3], other.lin2)]
    for head, block in zip(ours.heads, theirs.output_blocks, strict=True):
        pairs += [(head.radial, block.lin_rbf), (head.f[0], block.lin_up), (head.f[-1], block.lin)]
        pairs += list(zip(head.f[1:-1:2], block.lins, strict=True))
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())


def lattice(dtype: torch.dtype) -> tuple[Tensor, Tensor, Graph, Graph]:
    """Two molecules of six atoms that are not close to each other."""
    grid = torch.cartesian_prod(*(torch.arange(n, dtype=dtype) for n in (2, 2, 3)))
    positions, of_atom = grid + 0.3 * torch.rand(12, 3, dtype=dtype), torch.tensor([0] * 6 + [1] * 6)
    pool = graphs.from_edges(torch.stack([torch.arange(12), of_atom]), num_src=12, num_dst=2)
    graph = graphs.radius(positions, CUTOFF, labels=of_atom)
    return torch.randint(1, 4, (12,)), positions.requires_grad_(), graph, pool


@DTYPES
@pytest.mark.parametrize("spherical", [2, 3])
@pytest.mark.sample(4)
def test_dimenet_is_that_of_pyg(
    dtype: torch.dtype, spherical: int, measured: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sympy")
    pyg = pytest.importorskip("torch_geometric.nn.models.dimenet")
    utils = pytest.importorskip("torch_geometric.nn.models.dimenet_utils")
    types, positions, graph, pool = lattice(dtype)
    src, dst = graph.edge_index
    # all pairs of edges k -> j and j -> i with k != i, in place of a function that needs torch_sparse
    kj, ji = ((dst[:, None] == src[None]) & (src[:, None] != dst[None])).nonzero().T
    monkeypatch.setattr(pyg, "radius_graph", lambda *_, **__: graph.edge_index)
    monkeypatch.setattr(pyg, "triplets", lambda *_, **__: (dst, src, dst[ji], src[ji], src[kj], kj, ji))
    rounded = utils.Jn_zeros(spherical, 3)
    torch.testing.assert_close(torch.from_numpy(rounded), torch.from_numpy(bessel_zeros(spherical, 3)).float())
    monkeypatch.setattr(utils, "Jn_zeros", bessel_zeros)  # its own are rounded to float32
    theirs = pyg.DimeNetPlusPlus(
        8, 2, 2, 6, 8, 16, spherical, 3, CUTOFF, output_initializer="glorot_orthogonal"
    ).to(dtype)  # fmt: skip
    ours = DimeNet(8, 2, 6, spherical, 3, CUTOFF, types=95, out_dim=2).to(dtype)
    dimenet_of_pyg(ours, theirs)
    results = []
    for energy in (ours(types, positions, graph, pool), theirs(types, positions, pool.edge_index[1])):
        force = forces(energy, positions, create_graph=True)
        results.append((energy, force, *torch.autograd.grad(force.square().sum(), positions)))
    for found, expected in zip(*results, strict=True):
        scale = expected.abs().max().clamp(min=1).item()
        error = (found - expected).abs().max().item() / scale
        measured(SYSTEM, "PyTorch Geometric DimeNet++", error, error_bound(12, 40, dtype))


def test_the_basis_is_that_of_scipy() -> None:
    special = pytest.importorskip("scipy.special")
    basis, zeros = DimeNet(4, 1, 4, 7, 6, 5.0).double().basis, bessel_zeros(7, 6)
    assert all(abs(special.spherical_jn(order, zeros[order])).max() < 1e-13 for order in range(7))
    length, angle = torch.linspace(0.5, 4.9, 30, dtype=torch.float64), torch.linspace(0, 9, 30, dtype=torch.float64)
    vectors = length[:, None] * torch.stack([angle.cos(), angle.sin(), 0 * angle], 1)
    line = graphs.from_edges(torch.stack([torch.arange(30), torch.arange(30).roll(7)]), 30)
    d, cos = length[:, None].numpy() / 5, (angle - angle.roll(7)).cos()[:, None].numpy()
    for order in range(7):
        norm = math.sqrt((2 * order + 1) / (2 * math.pi)) / abs(special.spherical_jn(order + 1, zeros[order]))
        along = (1 / d - 28 * d**5 + 48 * d**6 - 21 * d**7) * norm * special.spherical_jn(order, zeros[order] * d)
        expected = torch.from_numpy(along * special.eval_legendre(order, cos))
        found = basis(vectors, line)[1][:, 6 * order : 6 * order + 6]
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_egnn_is_its_formula(measured: Callable[..., None]) -> None:
    _, positions, graph, _ = molecules()
    model, x = EGNN(4, 2, 8, 2).double(), torch.randn(N, 4, dtype=torch.float64)
    for layer in model.layers:
        nn.init.normal_(layer.move[-1].weight)
    h, at = model.embed(x), positions
    src, dst = graph.edge_index
    for layer in model.layers:
        edges, update = layer.states.edges, layer.states.update
        squares = (at[dst] - at[src]).square().sum(1, keepdim=True)
        weight = torch.cat([edges.of_edge.weight, edges.of_dst.weight, edges.of_src.weight], 1)
        message = edges.f(F.linear(torch.cat([squares, h[dst], h[src]], 1), weight, edges.of_dst.bias))
        moves = torch.zeros_like(at).index_add(0, dst, (at[dst] - at[src]) * layer.move(message))
        received = torch.zeros_like(h).index_add(0, dst, message)
        h = h + update.f(update.linear(torch.cat([h, received], 1)))
        at = at + moves / graph.degree().clamp(min=1)[:, None]
    for found, expected in zip(model(x, positions, graph), (model.head(h), at), strict=True):
        measured(SYSTEM, "formula", (found - expected).abs().max().item(), 1e-10)


def test_painn_is_its_formula(measured: Callable[..., None]) -> None:
    types, positions, graph, pool = molecules()
    model = PaiNN(8, 2, 6, CUTOFF).double()
    src, dst = graph.edge_index
    vectors = positions[src] - positions[dst]
    basis, unit = model.basis(vectors.norm(dim=1)), vectors / vectors.norm(dim=1, keepdim=True)
    s = model.embed(types)
    v = s.new_zeros(N, 3, 8)
    for layer in model.layers:
        a, b, c = (layer.of_source(s)[src] * layer.filter(basis)).chunk(3, -1)
        s = s + torch.zeros_like(s).index_add(0, dst, a)
        v = v + torch.zeros_like(v).index_add(0, dst, v[src] * b[:, None] + unit[..., None] * c[:, None])
        u, w = layer.mix(v).chunk(2, -1)
        f_ss, f_sv, f_vv = layer.gates(torch.cat([s, (w.square().sum(1) + 1e-8).sqrt()], -1)).chunk(3, -1)
        s, v = s + f_ss + f_sv * (u * w).sum(1), v + f_vv[:, None] * u
    expected = torch.zeros(2, 1, dtype=torch.float64).index_add(0, pool.edge_index[1], model.head(s))
    found = model(types, positions, graph, pool)
    measured(SYSTEM, "formula", (found - expected).abs().max().item(), 1e-10)


@pytest.mark.parametrize("make", [lambda: SchNet(8, 6, 2, 10, CUTOFF), lambda: PaiNN(8, 2, 6, CUTOFF), dimenet])
def test_energies_stay_and_forces_turn(make: Callable[[], nn.Module]) -> None:
    types, positions, graph, pool = molecules()
    model = make().double()
    moved, rotation = turned(positions)
    energy, after = model(types, positions, graph, pool), model(types, moved, graph, pool)
    torch.testing.assert_close(after, energy, rtol=1e-10, atol=1e-10)
    leaf = moved.detach().requires_grad_()
    turned_force = forces(model(types, leaf, graph, pool), leaf)
    torch.testing.assert_close(turned_force, forces(energy, positions) @ rotation.T, rtol=1e-9, atol=1e-10)


def test_positions_of_egnn_turn() -> None:
    _, positions, graph, _ = molecules()
    model, x = EGNN(4, 2, 8, 2).double(), torch.randn(N, 4, dtype=torch.float64)
    for layer in model.layers:
        nn.init.normal_(layer.move[-1].weight)
    rotation, shift = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0], torch.randn(3, dtype=torch.float64)
    (y, at), (z, there) = model(x, positions, graph), model(x, positions @ rotation.T + shift, graph)
    torch.testing.assert_close(z, y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(there, at @ rotation.T + shift, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: SchNet(4, 4, 1, 5, 2.0), lambda: PaiNN(4, 1, 5, 2.0)])
def test_forces_train_by_csr(make: Callable[[], nn.Module]) -> None:
    """Second derivatives, by positions and by weights, against finite differences, in a periodic cell."""
    types = torch.tensor([1, 2, 1])
    positions, cell = torch.rand(3, 3, dtype=torch.float64, requires_grad=True), torch.eye(3, dtype=torch.float64) * 1.5
    graph, model = graphs.radius(positions, 1.2, cell=cell), make().double()

    def energy(positions: Tensor, cell: Tensor) -> Tensor:
        return model(types, positions, graph, cell=cell).sum()

    assert torch.autograd.gradgradcheck(energy, (positions, cell.requires_grad_()))
    force = forces(energy(positions, cell), positions, create_graph=True)
    force.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.embed.parameters())


def test_filters_that_do_not_fit_are_refused() -> None:
    graph, x = graphs.from_edges([[0, 1], [1, 0]], 2), torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"weights \[2, 3\], one for each edge and feature; got \[2, 1\]"):
        EdgeFilter()(x, x, graph, torch.randn(2, 1))
    with pytest.raises(ValueError, match="EdgeFilter needs edge features"):
        EdgeFilter()(x, x, graph)


def test_an_atom_that_is_its_own_neighbor_is_refused() -> None:
    loops = graphs.from_edges([[0, 1], [1, 1]], 2)
    with pytest.raises(ValueError, match="DimeNet's graph must have no self-loops"):
        DimeNet(4, 1, 4, 2, 2)(torch.tensor([1, 2]), torch.randn(2, 3), loops)
    positions = torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, 0, 0]])
    with pytest.raises(ValueError, match="atoms 1 and 0 lie at the same place"):
        DimeNet(4, 1, 4, 2, 2)(torch.tensor([1, 2, 1]), positions, graphs.radius(positions, 1.5))


def small_dimenet(dim: int, layers: int, cutoff: float) -> DimeNet:
    """With heads that are not zero."""
    model = DimeNet(dim, layers, 4, 3, 2, cutoff)
    for head in model.heads:
        nn.init.normal_(head.f[-1].weight)
    return model


@pytest.mark.parametrize("make", [SchNet, PaiNN, small_dimenet])
def test_crystals_of_a_batch_are_those_alone(make: Any) -> None:
    model, cells = make(8, layers=1, cutoff=1.8).double(), torch.stack([2 * torch.eye(3), 3 * torch.eye(3)]).double()
    positions = [torch.rand(3, 3).double() * 2, torch.rand(4, 3).double() * 3]
    crystals = [graphs.radius(p, 1.8, cell=cell) for p, cell in zip(positions, cells, strict=True)]
    types, label = torch.randint(9, (7,)), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    pool = graphs.from_edges(torch.stack([torch.arange(7), label]), num_src=7, num_dst=2)
    alone = [model(types[label == k], positions[k], crystals[k], cell=cells[k]).sum(0) for k in range(2)]
    together = model(types, torch.cat(positions), graphs.batch(crystals), pool, cells)
    torch.testing.assert_close(together, torch.stack(alone))
    assert together.std() > 1e-3


@pytest.mark.parametrize("make", [SchNet, PaiNN, small_dimenet])
def test_a_supercell_holds_each_atom_as_often_as_the_cell(make: Any) -> None:
    """Whose images are atoms of their own. The cutoff reaches an atom's own images."""
    model, at, types = make(8, layers=2, cutoff=1.2).double(), torch.rand(3, 3).double(), torch.tensor([1, 2, 3])
    one = model(types, at, graphs.radius(at, 1.2, cell=torch.eye(3).double()), cell=torch.eye(3).double())
    corners = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 3)
    images, large = (corners[:, None] + at).flatten(0, 1), 3 * torch.eye(3).double()
    many = model(types.repeat(27), images, graphs.radius(images, 1.2, cell=large), cell=large)
    torch.testing.assert_close(many, one.repeat(27, 1))
    assert one.std() > 1e-3


def test_egnn_in_a_cell_moves_every_image_alike() -> None:
    model, x, at = EGNN(4, 2, 8, 2).double(), torch.randn(3, 4).double(), torch.rand(3, 3).double()
    for layer in model.layers:
        nn.init.normal_(layer.move[-1].weight)
    cell = torch.eye(3).double()
    y, moved = model(x, at, graphs.radius(at, 1.2, cell=cell), cell)
    corners = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 3)
    images = (corners[:, None] + at).flatten(0, 1)
    many, there = model(x.repeat(27, 1), images, graphs.radius(images, 1.2, cell=3 * cell), 3 * cell)
    torch.testing.assert_close(many, y.repeat(27, 1))
    torch.testing.assert_close(there, (corners[:, None] + moved).flatten(0, 1))


@pytest.mark.parametrize("make", [SchNet, PaiNN, DimeNet])
def test_a_periodic_graph_without_its_cell_is_refused(make: Any) -> None:
    positions, types = torch.rand(6, 3), torch.ones(6, dtype=torch.int64)
    graph = graphs.radius(positions, 0.6, cell=torch.eye(3))
    with pytest.raises(ValueError, match="shifts of a periodic cell: pass the cell of Graph"):
        make()(types, positions, graph)
