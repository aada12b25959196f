"""The pairs of a mask, decided in blocks, against torch's create_mask, which computes all of them: random rules."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

from mpnn import flex
from mpnn.flex import pairs
from mpnn.flex.bounds import Blocks, Bounds
from mpnn.flex.programs import record

Mod = Callable[..., Tensor]
COUNTS = torch.tensor([3, 0, 7, 2, 2, 5, 1, 4, 6, 0, 9, 3, 3])
PLACES = torch.arange(37) // 5
WEIGHTS = torch.tensor([0.5, -1.25, torch.inf, 2.0, torch.nan, 0.1, 3.0])
SMALL = torch.tensor([100, -100, 5], dtype=torch.int8)
OFFSET = torch.tensor(4)
LAYOUT = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) > 0.6
STEPS = torch.arange(40) % 3 == 0
OF_ENTRY = torch.tensor([5, 17])


class Rules:
    """Random rules, as text that is evaluated, so that a failure shows the rule."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def index(self, depth: int) -> str:
        return f"({self.integer(depth)}).abs()"

    def integer(self, depth: int) -> str:
        """Of integers, of several types."""
        leaf = ["q", "kv", "q", "kv", str(self.random.randint(-9, 40)), "OFFSET", "COUNTS[q % 13]", "COUNTS[kv % 13]"]
        leaf += [
            "PLACES[q % 37]",
            "PLACES[kv % 37]",
            "SMALL[q % 3]",
            "OF_ENTRY[b]",
            "h",
            "q.int()",
            "kv.to(torch.int8)",
        ]
        if depth == 0:
            return self.pick(*leaf)
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        constant = self.random.randint(1, 9)
        return self.pick(
            *(f"({x} + {y})", f"({x} - {y})", f"({x} - {y})", "(q - kv)", f"({x} * {constant})", f"({x} * {y})"),
            *(f"(0 * q + {x}).abs()", f"(-({x}))", f"((q * 0 + {x}) // {constant})", f"((q * 0 + {x}) % {constant})"),
            *(f"torch.minimum(q * 0 + {x}, q * 0 + {y})", f"torch.maximum(q * 0 + {x}, kv * 0 + {y})"),
            *(f"(q * 0 + {x}).clamp({-constant}, {constant})", f"(q * 0 + {x}).clamp(max={constant})"),
            f"torch.where({self.pick('q > kv', 'kv * 2 < q + 5', 'q == 3')}, q * 0 + {x}, q * 0 + {y})",
            *("(q << 1)", f"(q * {1 << 60})", f"({x} + {1 << 62})"),
        )

    def real(self, depth: int) -> str:
        leaf = ["WEIGHTS[q % 7]", "WEIGHTS[kv % 7]", "q * 0.5", "kv * 1.0", "kv.float()", "q.double()", "q / 3"]
        if depth == 0:
            return self.pick(*leaf)
        x, y = self.real(depth - 1), self.real(depth - 1)
        return self.pick(f"({x} + {y})", f"({x} - {y})", f"({x} * {y})", f"({x}).abs()", f"({x}).sin()", f"({x} - q)")

    def condition(self, depth: int) -> str:
        if depth == 0:
            number = self.pick(self.integer, self.integer, self.integer, self.real)
            deep = self.random.randint(0, 2)
            x, y = number(deep), number(deep)
            compared = f"(q * 0 + {x} {self.pick('<', '<=', '>', '>=', '==', '!=')} {y})"
            looked_up = f"LAYOUT[(q // 4) % 9, (kv // {self.pick(3, 4)}) % 9]", "STEPS[(q - kv).abs() % 40]"
            return self.pick(compared, compared, compared, *looked_up, "(q - kv > 2)", "((q - kv) % 3 == 0)")
        x, y, z = (self.condition(depth - 1) for _ in range(3))
        operation = self.pick("&", "&", "|", "|", "^")
        logical = self.pick("and", "or", "xor")
        return self.pick(
            *(f"({x} {operation} {y})", f"({x} {operation} {y})", f"(~{x})", f"torch.where({x}, {y}, {z})"),
            *(f"torch.logical_{logical}({x}, {y})", f"torch.logical_not({x})", f"({x} == {y})", f"({x} & True)"),
        )


def rule(text: str) -> Mod:
    made: Mod = eval(f"lambda b, h, q, kv: {text}", globals())
    return made


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are divided down to two rows, so that small masks go through all that large ones do."""
    for name, value in (("_SMALLEST", 2), ("_PARTS", 2), ("_MOST_AT_FIRST", 9), ("_DENSE", 4), ("_FEW", 0)):
        monkeypatch.setattr(pairs, name, value)
    monkeypatch.setattr(pairs, "_PAIRS", 100)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("ignore")  # numpy's, of infinities
@pytest.mark.parametrize("seed", range(40))
def test_random_rules(seed: int) -> None:
    rules = Rules(seed)
    sizes = 2, 2, rules.random.randint(1, 45), rules.random.randint(1, 45)
    tried = 0
    while tried < 6:
        text = rules.condition(rules.random.randint(0, 3))
        try:
            expected = of_torch.create_mask(rule(text), *sizes, device="cpu")
        except (RuntimeError, TypeError, AttributeError):  # torch has no such operation
            continue
        tried += 1
        found = flex.create_block_mask(rule(text), *sizes).graphs
        for b in range(2):
            for h in range(2):
                graph = found[b % len(found)][h % len(found[0])]
                assert graph.dense().equal(expected[b, h]), f"{text}, b={b}, h={h}, {sizes}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(30))
def test_bounds_are_never_wrong(seed: int) -> None:
    """Of blocks of any size, also one by one."""
    rules = Rules(1000 + seed)
    num_dst, num_src = rules.random.randint(1, 30), rules.random.randint(1, 30)
    for _ in range(20):
        text = rules.condition(rules.random.randint(0, 3))
        try:
            (expected,) = of_torch.create_mask(rule(text), 1, 1, num_dst, num_src, device="cpu")[0]
        except (RuntimeError, TypeError, AttributeError):
            continue
        program = record(rule(text))
        height, width = rules.random.randint(1, 9), rules.random.randint(1, 9)
        rows, columns = torch.meshgrid(
            torch.arange(-(-num_dst // height)), torch.arange(-(-num_src // width)), indexing="ij"
        )
        blocks = Blocks(rows.flatten().numpy(), columns.flatten().numpy(), height, width)
        full, empty = Bounds(program, 0, 0, num_dst, num_src).decide(blocks)
        for k, (row, column) in enumerate(zip(blocks.row.tolist(), blocks.column.tolist(), strict=True)):
            block = expected[row * height : (row + 1) * height, column * width : (column + 1) * width]
            assert not (full[k] and not block.all()), f"{text} {row} {column}"
            assert not (empty[k] and block.any()), f"{text} {row} {column}"


DOCUMENT = torch.arange(4096) // 300
RECOGNIZED: dict[str, Mod] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "offset": lambda b, h, q, kv: kv <= q + OFFSET,
    "window": lambda b, h, q, kv: (q - kv < 200) & (q >= kv),
    "window by distance": lambda b, h, q, kv: (q - kv).abs() <= 200,
    "documents": lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv],
    "causal documents": of_torch.and_masks(
        lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv], lambda b, h, q, kv: q >= kv
    ),
    "documents or a prefix": of_torch.or_masks(
        lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv], lambda b, h, q, kv: kv < 70
    ),
    "not": lambda b, h, q, kv: ~(DOCUMENT[q] == DOCUMENT[kv]) & (kv <= q),
    "a chosen rule": lambda b, h, q, kv: torch.where(q < 2000, q >= kv, DOCUMENT[q] == DOCUMENT[kv]),
    "rows of an image": lambda b, h, q, kv: (q // 64 - kv // 64).abs() <= 3,
    "blocks": lambda b, h, q, kv: LAYOUT[q // 512, kv // 512],
    "nothing": of_torch.noop_mask,
}


@pytest.mark.parametrize("name", RECOGNIZED)
def test_few_pairs_of_recognized_rules_are_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a sixtieth of all."""
    mod = RECOGNIZED[name]
    monkeypatch.setattr(pairs, "MOST_PAIRS", 4096 * 4096 // 60)
    graph = flex.create_block_mask(mod, None, None, 4096, 4096).graphs[0][0]
    rows = torch.randint(4096, (50,), generator=torch.Generator().manual_seed(0)).sort().values
    zero = torch.zeros((), dtype=torch.int64)
    expected = torch.vmap(torch.vmap(record(mod), (None, None, None, 0)), (None, None, 0, None))
    found = graph.runs.take(rows.numpy()).dense()
    assert torch.from_numpy(found).equal(expected(zero, zero, rows, torch.arange(4096)))


def test_a_table_of_all_pairs_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.rand(2, 40, 50) > 0.5
    monkeypatch.setattr(pairs, "mapped", None)
    mask = flex.create_block_mask(lambda b, h, q, kv: table[b, q, kv], 2, None, 37, 50)
    for b in range(2):
        assert mask.graphs[b][0].dense().equal(table[b, :37])
    monkeypatch.undo()
    mask = flex.create_block_mask(lambda b, h, q, kv: (q >= kv) & table[1, q, kv] & table[0, kv % 40, q], 2, 3, 37, 50)
    at = torch.arange(37)[:, None], torch.arange(50)
    expected = (at[0] >= at[1]) & table[1, :37] & table[0].T[:37].index_select(1, torch.arange(50) % 40)
    assert mask.graphs[0][0].dense().equal(expected)


def test_too_many_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"evaluated for .* pairs, which are too many; build the graph by a topology"):
        flex.create_block_mask(lambda b, h, q, kv: (q * kv).sin() > 0, None, None, 1 << 20, 1 << 20)
    graph = flex.create_block_mask(lambda b, h, q, kv: q - kv == 3, None, None, 1 << 18, 1 << 18).graphs[0][0]
    assert graph.num_edges == (1 << 18) - 3


def test_masks_without_pairs() -> None:
    for sizes in ((0, 5), (5, 0), (0, 0), (1, 1)):
        graph = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, *sizes).graphs[0][0]
        assert (graph.num_dst, graph.num_src) == sizes
        assert graph.num_edges == (sizes == (1, 1))
