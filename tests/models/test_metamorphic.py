"""Relations that hold between two runs of a model, whatever its weights are: for every model, on fresh inputs each day.

`MPNN_FUZZ_SEED` chooses the inputs; the default is today's date, and a failure prints it. What is compared to the bit
has the same shapes in both runs. Where shapes differ, or sums run in another order, results differ by roundings, for
which `roundings` derives a bound.
"""

from __future__ import annotations

import copy
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import cache
from typing import Any

import pytest
import torch
from every_model import CAUSAL, CONTEXT, GRAPHS, ROWS, VOCABULARY, OnGraphs, OnRows, Outputs, Rows, World
from torch import Tensor, nn

from mpnn import models

pytestmark = pytest.mark.covering(times=2)

SEED = int(os.environ.get("MPNN_FUZZ_SEED") or date.today().strftime("%Y%m%d"))
CASES = [0, *(pytest.param(case, marks=pytest.mark.slow) for case in range(1, 3))]  # and others tomorrow

OF_NODES_ONLY = {
    *("ArrivalTimes", "GPS", "GraphBert", "GraphPredictor", "Graphormer", "PinSage"),
    *(
        "Inner",
        "LinkPredictor",
        "LinkRanker",
        "ComplEx",
        "DistMult",
        "PairMLP",
        "EGNN",
        "PaiNN",
        "SchNet",
        "DimeNet",
        "TGNMemory",
    ),
}
"""Models whose features are [N, in_dim], without a batch."""

Run = Callable[[nn.Module], Outputs]
"""A model with its inputs."""


class Case:
    """One model with random weights, in a random type, and a generator of inputs."""

    def __init__(self, name: str, make: Callable[[], nn.Module], number: int, dtype: torch.dtype | None = None) -> None:
        self.random = torch.Generator().manual_seed(zlib.crc32(f"{SEED} {name} {number}".encode()))
        torch.manual_seed(self.number(0, 2**31))
        drawn = (torch.float32, torch.float64)[self.number(0, 2)]
        self.dtype = drawn if dtype is None else dtype
        self.model = scrambled(make()).to(self.dtype).eval()

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.random))

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.random)

    def world(self) -> World:
        sizes = tuple(self.number(4, 9) for _ in range(3))
        return World.draw(self.random, sizes, self.number(1, 5)).to(self.dtype)

    def rows(self, entry: OnRows, batch: int = 3) -> Rows:
        return cast(entry.draw(self.random, batch), self.dtype)

    def tokens(self) -> Tensor:
        """[2, N], no token twice in a sentence."""
        length = self.number(5, CONTEXT + 1)
        return torch.stack([3 + self.order(VOCABULARY - 3)[:length] for _ in range(2)])


@torch.no_grad()
def scrambled(model: nn.Module) -> nn.Module:
    """With weights of which none is zero, and running statistics that matter."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    return model


def cast(rows: Rows, dtype: torch.dtype) -> Rows:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in rows)


def roundings(model: nn.Module, run: Run, dtype: torch.dtype) -> Outputs:
    """How far apart two runs may be whose roundings differ, for each output.

    A product with a matrix of n rows adds n numbers, which rounds as much as if each of its weights were off by at most
    n u, u the type's unit of rounding (Higham, Accuracy and Stability, section 3.1). The roundings of a model are thus
    those of its weights being off by the sum over its maps; how far that moves the outputs is measured, in float64.
    """
    u = torch.finfo(dtype).eps / 2
    off = u * sum(max(p.shape) for p in model.parameters() if p.dim() > 1) + 16 * u
    exact = copy.deepcopy(model).double()
    base, bound = run(exact), {}
    for _ in range(3):
        moved = copy.deepcopy(exact)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1 + off * (2 * torch.rand_like(parameter) - 1))
        for name, out in run(moved).items():
            change = (out - base[name]).abs().max() + off * base[name].abs().max()
            bound[name] = torch.maximum(bound.get(name, change), change)
    return bound


@cache
def usual_roundings(name: str, number: int, dtype: torch.dtype | None = None) -> Outputs:
    """`roundings` of a model on the inputs that its case draws first: several relations allow them, each of its own."""
    case, run = any_run(name, number, dtype)
    return roundings(case.model, run, case.dtype)


def assert_near(found: Outputs, expected: Outputs, bound: Outputs) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.shape == expected[name].shape
        error = (x.double() - expected[name].double()).abs().max()
        assert error <= bound[name], f"{name}: {error:.1e} apart, roundings explain {bound[name]:.1e}"


def assert_same(found: Outputs, expected: Outputs) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.equal(expected[name]), f"{name}: {(x - expected[name]).abs().max():.1e} apart, expected the same bits"


@pytest.fixture(autouse=True)
def _say_the_seed() -> None:
    print(f"repeat with MPNN_FUZZ_SEED={SEED}")


def of_each(table: dict[str, Any]) -> Callable[[Any], Any]:
    """Every model of the table, in every case."""

    def decorate(test: Any) -> Any:
        named = pytest.mark.parametrize("name", list(table))
        return pytest.mark.parametrize("number", CASES)(named(test))

    return decorate


def test_no_model_is_left_out() -> None:
    """A model without an entry in `every_model.py` goes unchecked: add it to the table of what it takes."""
    offered = vars(models)
    modules = {name for name, x in offered.items() if isinstance(x, type) and issubclass(x, nn.Module)}
    assert modules - {"Model"} == GRAPHS.keys() | ROWS.keys()
    assert {name for name in modules if hasattr(offered[name], "generate")} <= CAUSAL.keys()


# ------------------------------------------------------------------------------------------------------------- graphs


def on(entry: OnGraphs, world: World) -> Run:
    def run(model: nn.Module) -> Outputs:
        dtype = next((p.dtype for p in model.parameters()), world.x.dtype)
        with torch.no_grad():
            return entry.call(model, world.to(dtype))

    return run


@of_each(GRAPHS)
def test_nodes_may_be_numbered_in_any_order(name: str, number: int) -> None:
    case, entry = Case(name, GRAPHS[name].make, number), GRAPHS[name]
    world = case.world()
    order = torch.cat([sum(world.sizes[:k]) + case.order(n) for k, n in enumerate(world.sizes)])
    expected = on(entry, world)(case.model)
    if "nodes" in expected:
        expected["nodes"] = expected["nodes"][order]
    found = on(entry, world.relabeled(order))(case.model)
    assert_near(found, expected, usual_roundings(name, number))


@of_each({name: entry for name, entry in GRAPHS.items() if name != "Graphormer"})
def test_edges_may_be_listed_in_any_order(name: str, number: int) -> None:
    """Except a Graphormer's: of several shortest paths it reads the one whose edges are listed first."""
    case, entry = Case(name, GRAPHS[name].make, number), GRAPHS[name]
    world = case.world()
    order = case.order(world.edges.shape[1])
    expected = on(entry, world)(case.model)
    if "edges" in expected:
        expected["edges"] = expected["edges"][order]
    found = on(entry, world.reordered(order))(case.model)
    assert_near(found, expected, usual_roundings(name, number))


def part(out: Outputs, world: World, k: int) -> Outputs:
    """What outputs say of graph k."""
    of = {"nodes": world.of_node, "edges": world.of_edge, "graphs": torch.arange(len(world.sizes))}
    return {name: x[of[name] == k] for name, x in out.items()}


@of_each(GRAPHS)
def test_a_graph_of_a_batch_is_as_it_is_alone(name: str, number: int) -> None:
    case, entry = Case(name, GRAPHS[name].make, number), GRAPHS[name]
    world = case.world()
    together, bound = on(entry, world)(case.model), usual_roundings(name, number)
    for k in range(len(world.sizes)):
        assert_near(on(entry, world.alone(k))(case.model), part(together, world, k), bound)


@of_each({name: entry for name, entry in GRAPHS.items() if name not in OF_NODES_ONLY})
def test_one_graph_serves_a_batch_of_features(name: str, number: int) -> None:
    case, entry = Case(name, GRAPHS[name].make, number), GRAPHS[name]
    world = case.world()
    alone = [replace(world, x=x) for x in (world.x, world.x.flip(0), 2 * world.x)]
    together = on(entry, replace(world, x=torch.stack([w.x for w in alone])))(case.model)
    bound = roundings(case.model, on(entry, alone[2]), case.dtype)
    for k, one in enumerate(alone):
        assert_near({name: x[k] for name, x in together.items()}, on(entry, one)(case.model), bound)


@of_each(GRAPHS)
def test_a_graph_changes_no_bit_of_the_others(name: str, number: int) -> None:
    case, entry = Case(name, GRAPHS[name].make, number), GRAPHS[name]
    world, k = case.world(), case.number(0, 3)
    other = World.draw(case.random, world.sizes, 1).to(case.dtype)
    x = torch.where(world.of_node[:, None] == k, 10 * other.x, world.x)
    attr = torch.where(world.of_edge[:, None] == k, world.attr.flip(1), world.attr)
    changed = World(x, world.edges, attr, world.kind, world.sizes, world.subgraphs)
    before, after = (on(entry, w)(case.model) for w in (world, changed))
    for rest in {0, 1, 2} - {k}:
        assert_same(part(after, world, rest), part(before, world, rest))


@of_each(GRAPHS)
def test_a_graph_gets_no_gradient_from_the_others(name: str, number: int) -> None:
    case, entry = Case(name, GRAPHS[name].make, number), GRAPHS[name]
    world, k = case.world(), case.number(0, 3)
    x, attr = world.x.requires_grad_(), world.attr.requires_grad_()
    out = part(entry.call(case.model, world), world, k)
    sum(y.square().sum() for y in out.values()).backward()
    assert x.grad is not None
    assert not x.grad[world.of_node != k].any()
    assert attr.grad is None or not attr.grad[world.of_edge != k].any()


# --------------------------------------------------------------------------------------------- rows of a batch


def with_rows(entry: OnRows, rows: Rows) -> Run:
    def run(model: nn.Module) -> Outputs:
        with torch.no_grad():
            return {"rows": entry.call(model, *cast(rows, next(model.parameters()).dtype))}

    return run


@of_each(ROWS)
def test_a_row_of_a_batch_is_as_it_is_alone(name: str, number: int) -> None:
    """Hashes of a Reformer are discrete: a rounding of float32 may turn one over, so that it is checked in float64."""
    entry = ROWS[name]
    case = Case(name, entry.make, number, torch.float64 if "Reformer" in name else None)
    rows = case.rows(entry)
    together = with_rows(entry, rows)(case.model)["rows"]
    bound = usual_roundings(name, number, torch.float64 if "Reformer" in name else None)
    for k in range(len(rows[0])):
        alone = with_rows(entry, tuple(x[k : k + 1] for x in rows))(case.model)
        assert_near(alone, {"rows": together[k : k + 1]}, bound)


@of_each(ROWS)
def test_a_row_changes_no_bit_of_the_others(name: str, number: int) -> None:
    """Masks stay as they are, so that shapes do: what they hide may change as well."""
    case, entry = Case(name, ROWS[name].make, number), ROWS[name]
    rows, k = case.rows(entry), case.number(0, 3)
    if rows[0].is_floating_point():
        others = cast(entry.draw(case.random, 3), case.dtype)
    else:
        others = tuple(case_tokens(case, x) for x in rows)
    chosen = torch.arange(3) == k
    changed = tuple(
        x if x.dtype == torch.bool else torch.where(chosen.view(-1, *[1] * (x.dim() - 1)), y, x)
        for x, y in zip(rows, others, strict=True)
    )
    before, after = (with_rows(entry, r)(case.model)["rows"][~chosen] for r in (rows, changed))
    assert_same({"rows": after}, {"rows": before})


def case_tokens(case: Case, like: Tensor) -> Tensor:
    return torch.randint(3, VOCABULARY, like.shape, generator=case.random)


MASKED = {name: entry for name, entry in ROWS.items() if entry.draw.__name__ == "sentences"}


@of_each(MASKED)
def test_tokens_behind_a_mask_change_no_bit(name: str, number: int) -> None:
    case, entry = Case(name, ROWS[name].make, number), ROWS[name]
    tokens, keep = case.rows(entry)
    hidden = torch.where(keep, tokens, case_tokens(case, tokens))
    before, after = (with_rows(entry, (x, keep))(case.model) for x in (tokens, hidden))
    assert_same(after, before)


@of_each({name: entry for name, entry in MASKED.items() if "Reformer" not in name})
def test_padding_may_be_left_off(name: str, number: int) -> None:
    """Except a Reformer's: it counts its buckets by the length of the batch, padding included."""
    case, entry = Case(name, ROWS[name].make, number), ROWS[name]
    tokens, keep = case.rows(entry)
    together = with_rows(entry, (tokens, keep))(case.model)["rows"]
    bound = usual_roundings(name, number)
    for k, length in enumerate(keep.sum(1).tolist()):
        short = with_rows(entry, (tokens[k : k + 1, :length], keep[k : k + 1, :length]))(case.model)["rows"]
        whole = together[k : k + 1]
        assert_near({"rows": short}, {"rows": whole if name == "SentenceClassifier" else whole[:, :length]}, bound)


@contextmanager
def watched_tables(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What the model looks up in its tables of tokens while this is open: (tokens, vectors)."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(table: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        out.retain_grad()
        seen.append((given[0], out))

    tables = [t for t in model.modules() if isinstance(t, nn.Embedding) and t.num_embeddings == VOCABULARY]
    hooks = [table.register_forward_hook(note) for table in tables]
    yield seen
    for hook in hooks:
        hook.remove()


OF_TOKENS = {name: entry for name, entry in ROWS.items() if "sentences" in entry.draw.__name__}


@of_each(OF_TOKENS)
def test_a_sentence_gets_no_gradient_from_the_others(name: str, number: int) -> None:
    """Sentence 0 is the only one with tokens below 9."""
    case, entry = Case(name, ROWS[name].make, number), ROWS[name]
    rows = tuple(
        x if x.dtype == torch.bool else torch.where(torch.arange(3)[:, None] == 0, 3 + x % 6, 9 + x % 8)
        for x in case.rows(entry)
    )
    with watched_tables(case.model) as seen:
        entry.call(case.model, *rows)[0].square().sum().backward()
    assert seen
    assert any(out.grad[tokens < 9].any() for tokens, out in seen if out.grad is not None)
    assert not any(out.grad[tokens >= 9].any() for tokens, out in seen if out.grad is not None)


# ---------------------------------------------------------------------------------------- what comes one after another


def with_tokens(call: Callable[[Any, Any], Tensor], tokens: Any) -> Run:
    def run(model: nn.Module) -> Outputs:
        with torch.no_grad():
            return {"logits": call(model, tokens)}

    return run


@of_each(CAUSAL)
def test_later_tokens_do_not_matter(name: str, number: int) -> None:
    case, entry = Case(name, CAUSAL[name].make, number), CAUSAL[name]
    tokens = case.tokens()
    now = case.number(1, tokens.shape[1])
    later = torch.cat([tokens[:, :now], case_tokens(case, tokens[:, now:])], 1)
    before, after = (with_tokens(entry.call, x)(case.model)["logits"][:, :now] for x in (tokens, later))
    if entry.bits:
        assert_same({"logits": after}, {"logits": before})
    else:
        bound = roundings(case.model, with_tokens(entry.call, tokens), case.dtype)
        assert_near({"logits": after}, {"logits": before}, bound)


@of_each(CAUSAL)
def test_later_tokens_get_no_gradient(name: str, number: int) -> None:
    case, entry = Case(name, CAUSAL[name].make, number), CAUSAL[name]
    tokens = case.tokens()[:1].repeat(2, 1)  # no token twice, so that a token says where it stands
    now = case.number(1, tokens.shape[1])
    with watched_tables(case.model) as seen:
        entry.call(case.model, tokens)[:, :now].square().sum().backward()
    later = torch.isin(torch.arange(VOCABULARY), tokens[0, now:])
    targets = [(x, out) for x, out in seen if torch.isin(x, tokens).all()]
    assert targets
    assert not any(out.grad[later[x]].any() for x, out in targets if out.grad is not None)


CACHED = {name: entry for name, entry in CAUSAL.items() if entry.cached is not None}


@of_each(CACHED)
def test_token_by_token_is_the_whole(name: str, number: int) -> None:
    case, entry = Case(name, CAUSAL[name].make, number), CAUSAL[name]
    tokens = case.tokens()
    cuts = sorted({0, tokens.shape[1], *(case.number(1, tokens.shape[1]) for _ in range(case.number(0, 8)))})
    pieces = [tokens[:, a:b] for a, b in itertools.pairwise(cuts)]
    assert entry.cached is not None
    found = with_tokens(entry.cached, pieces)(case.model)
    run = with_tokens(entry.call, tokens)
    assert_near(found, run(case.model), roundings(case.model, run, case.dtype))


@of_each({name: entry for name, entry in CACHED.items() if name not in ("Seq2Seq", "Transformer")})
def test_greedy_generation_takes_the_likeliest_token_of_the_whole(name: str, number: int) -> None:
    case, entry = Case(name, CAUSAL[name].make, number, torch.float64), CAUSAL[name]
    start = case.tokens()[:, :4]
    out = case.model.generate(start, 8, temperature=0)
    assert out.shape == (2, 12)
    assert with_tokens(entry.call, out)(case.model)["logits"][:, 3:-1].argmax(-1).equal(out[:, 4:])


# ------------------------------------------------------------------------------------------------------- all of them


def any_run(name: str, number: int, dtype: torch.dtype | None = None) -> tuple[Case, Run]:
    if name in GRAPHS:
        case = Case(name, GRAPHS[name].make, number, dtype)
        return case, on(GRAPHS[name], case.world())
    case = Case(name, ROWS[name].make, number, dtype)
    return case, with_rows(ROWS[name], case.rows(ROWS[name]))


@of_each(GRAPHS | ROWS)
def test_the_same_inputs_give_the_same_bits(name: str, number: int) -> None:
    case, run = any_run(name, number)
    assert_same(run(case.model), run(case.model))


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_two_threads_give_the_same_bits_each_time(name: str) -> None:
    """Gradients too, on graphs so large that torch shares its work; a sum in the order in which threads come would
    differ from run to run."""
    case, entry = Case(name, GRAPHS[name].make, 0, torch.float32), GRAPHS[name]
    world, before = World.draw(case.random, (30, 500, 400) if name != "Graphormer" else (5, 40, 30), 8), None
    world.x.requires_grad_()
    torch.set_num_threads(2)
    try:
        for _ in range(4):
            case.model.zero_grad()
            world.x.grad = None
            out = entry.call(case.model, world)
            sum(y.square().sum() for y in out.values()).backward()
            gradients = {key: p.grad for key, p in case.model.named_parameters() if p.grad is not None}
            found = {**out, **gradients, "x": world.x.grad}
            if before is not None:
                assert_same(found, before)
            before = found
    finally:
        torch.set_num_threads(1)


@of_each({name: entry for name, entry in (GRAPHS | ROWS).items() if "Reformer" not in name})
def test_float32_is_float64_up_to_roundings(name: str, number: int) -> None:
    """Except a Reformer: it draws the directions of its hashes in its own type, as Hugging Face's does."""
    case, run = any_run(name, number, torch.float32)
    exact = copy.deepcopy(case.model).double()
    assert_near(run(case.model), run(exact), usual_roundings(name, number, torch.float32))
