"""mpnn.flex.programs: recorded functions of indices, each next to the function itself in a loop."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpnn.flex.programs import KV, B, H, Q, record

TABLE = torch.tensor([0.5, -1.25, 3.0, 2.0, 7.0])
LEARNED = torch.tensor(2.0, requires_grad=True)
OF: dict[str, tuple[set[int], Callable[..., Tensor]]] = {
    "nothing": (set(), lambda b, h, q, kv: torch.tensor(2.0)),
    "b": ({B}, lambda b, h, q, kv: TABLE[b]),
    "h": ({H}, lambda b, h, q, kv: 10 * h),
    "q": ({Q}, lambda b, h, q, kv: TABLE[q] + 1),
    "kv": ({KV}, lambda b, h, q, kv: torch.minimum(kv, torch.tensor(3))),
    "b and kv": ({B, KV}, lambda b, h, q, kv: 10 * b + kv),
    "h and q": ({H, Q}, lambda b, h, q, kv: TABLE[h] * q),
    "b and h": ({B, H}, lambda b, h, q, kv: torch.stack([b, h]).sum()),
    "all": ({B, H, Q, KV}, lambda b, h, q, kv: 1000 * b + 100 * h + 10 * q + kv),
}


@pytest.mark.parametrize("name", OF)
@pytest.mark.parametrize("edges", [4, 1, 0])
def test_numbers_of_each_entry_head_and_pair(name: str, edges: int) -> None:
    depends_on, function = OF[name]
    program = record(function)
    assert program.depends_on() == depends_on
    b, h = torch.tensor([1, 3, 0]), torch.tensor([4, 2])
    q, kv = torch.tensor([0, 4, 4, 2])[:edges], torch.tensor([3, 1, 4, 0])[:edges]
    found = program.over(b, h, q, kv)
    is_of_edges = bool(depends_on & {Q, KV})
    assert found.shape == (3 if B in depends_on else 1, 2 if H in depends_on else 1, edges if is_of_edges else 1)
    for i, j, e in itertools.product(range(3), range(2), range(edges)):
        number = function(b[i], h[j], q[e], kv[e])
        assert found.expand(3, 2, edges)[i, j, e] == number
        assert program(b[i], h[j], q[e], kv[e]) == number


def test_constants() -> None:
    functions: dict[Callable[..., Tensor], float | None] = {
        lambda b, h, q, kv: torch.tensor(2.5): 2.5,
        lambda b, h, q, kv: torch.tensor(2.5) * 2: 5.0,
        lambda b, h, q, kv: TABLE[:1]: 0.5,
        lambda b, h, q, kv: TABLE[:2]: None,
        lambda b, h, q, kv: LEARNED: None,
        lambda b, h, q, kv: q * 0: None,
    }
    for function, expected in functions.items():
        assert record(function).constant() == expected


def test_a_score_is_an_input_of_its_own() -> None:
    program = record(lambda score, b, h, q, kv: score + kv, torch.float32)  # type: ignore[misc]
    assert program.depends_on() == {-1, KV}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda b, h, q, kv: q - kv, True),
        (lambda b, h, q, kv: (kv - q) * 2, True),
        (lambda b, h, q, kv: (q >= kv) & (h > 1), True),
        (lambda b, h, q, kv: b + h, True),
        (lambda b, h, q, kv: q + kv, False),
        (lambda b, h, q, kv: q - q, False),
        (lambda b, h, q, kv: q - h, False),
        (lambda b, h, q, kv: q > 3, False),
        (lambda b, h, q, kv: torch.sub(q, kv, alpha=2), False),
        (lambda b, h, q, kv: (q - kv) + kv, False),
    ],
)
def test_which_depend_on_the_difference_of_two_indices(function: Callable[..., Tensor], expected: bool) -> None:
    assert record(function).is_by_offset() == expected
