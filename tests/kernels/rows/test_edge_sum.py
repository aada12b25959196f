"""mpnn.kernels.rows.edge_sum: maps of edges and of rows in blocks, next to torch's operations, for each set of tensors
that needs gradients."""

import pytest
import torch
from torch import Tensor

from mpnn.kernels.rows import edge_sum

DST, SRC = torch.tensor([0, 2, 2, 1, 0, 2, 0]), torch.tensor([3, 0, 1, 1, 2, 3, 0])
NAMES = ("edge", "weight", "of_dst", "of_src", "scale", "shift")


def function(z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (z * scale).tanh() + shift


def inputs(needs: tuple[str, ...], width: int = 4) -> list[Tensor]:
    shapes = ((2, 7, 4), (width, 4), (2, 3, width), (2, 4, width), (width,), (width,))
    return [
        torch.randn(shape, dtype=torch.float64, requires_grad=name in needs)
        for shape, name in zip(shapes, NAMES, strict=True)
    ]


@pytest.fixture(autouse=True, params=[1, 9, 1 << 18], ids="blocks of {} numbers".format)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_sum, "BLOCK", request.param)


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=["of edges", "of sums", "of both"])
@pytest.mark.parametrize("needs", [NAMES, *((name,) for name in NAMES), ("weight", "shift")], ids="+".join)
def test_maps_of_edges_and_their_gradients(residual: bool, of: tuple[int, ...], needs: tuple[str, ...]) -> None:
    tensors = inputs(needs)
    edge, weight, of_dst, of_src, scale, shift = tensors
    new = function(edge @ weight.T + of_dst[:, DST] + of_src[:, SRC], scale, shift)
    new = edge + new if residual else new
    expected = new, torch.zeros(2, 3, 4).double().index_add(1, DST, new)
    found = edge_sum.edge_map(function, residual, DST, SRC, *tensors)
    torch.testing.assert_close(found, expected)
    direction = [torch.randn_like(expected[k]) for k in of]
    leaves = [x for x in tensors if x.requires_grad]
    grads = [torch.autograd.grad([out[k] for k in of], leaves, direction) for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_the_function_may_change_the_width() -> None:
    edge, weight, of_dst, of_src, *_ = inputs((), width=6)
    new, sums = edge_sum.edge_map(lambda z: z[..., :5].exp(), False, DST, SRC, edge, weight, of_dst, of_src)
    expected = (edge @ weight.T + of_dst[:, DST] + of_src[:, SRC])[..., :5].exp()
    torch.testing.assert_close(new, expected)
    torch.testing.assert_close(sums, torch.zeros(2, 3, 5).double().index_add(1, DST, expected))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
def test_maps_of_rows_and_their_gradients(needs: tuple[bool, bool]) -> None:
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=needs[0])
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=needs[1])
    found, expected = edge_sum.row_map(lambda x, w: (x @ w).sin(), x, weight), (x @ weight).sin()
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    leaves = [t for t in (x, weight) if t.requires_grad]
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, direction) for out in (found, expected)))


def test_which_tensors_are_served() -> None:
    x, y = torch.zeros(2), torch.nn.Parameter(torch.zeros(3))
    assert edge_sum.serves(x, y)
    assert edge_sum.serves(x.double(), x.double())
    assert not edge_sum.serves(x, y.double())
    assert not edge_sum.serves(x.bfloat16(), x.bfloat16())
    assert not edge_sum.serves(x, x.to("meta"))
    with torch.autocast("cpu"):
        assert not edge_sum.serves(x, y)
    torch.func.vmap(lambda z: (z, edge_sum.serves(x, y))[0])(x)
