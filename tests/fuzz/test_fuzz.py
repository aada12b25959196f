"""2,000 cases of the fuzzer, new ones each day (728 of them are quick tests); and tests of the fuzzer itself.

It finds a planted error.

`MPNN_FUZZ_SEED=N` repeats the cases of another day.
"""

from __future__ import annotations

import datetime
import json
import os
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mpnn import graphs
from mpnn.backends import csr
from mpnn.engine.rewrites import fold_stacked, softmax_dst
from mpnn.graphs import trees
from mpnn.kernels.rows import attention as row_attention

from .cases import Case, draw_group, leaves
from .compare import Failure, check
from .oracle import drop_hash, solve
from .shrink import failure_of, paste, shrink
from .topologies import edges_of, matrix_of

SEED = int(os.environ.get("MPNN_FUZZ_SEED") or datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d")) * 1000
GROUPS = 13  # of eight cases, for each of 20 tests


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(row_attention, "_LONG", 0)  # heads that share keys go by destination, in short rows too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only arrays; operations that torch calls nondeterministic
        yield


@pytest.mark.parametrize(
    "first",
    [pytest.param(SEED + i * GROUPS, marks=[pytest.mark.slow] if i > 2 else []) for i in range(20)],
)
def test_every_backend_agrees_with_the_oracle(first: int) -> None:
    runs = backends_that_agree(first)
    assert min(runs["csr"], runs["edge_list"]) > GROUPS, "backends refused almost all cases"


@pytest.mark.scatter
@pytest.mark.parametrize("first", [SEED + i * GROUPS for i in range(20, 40, 5)])
def test_the_scatter_extra_agrees_with_the_oracle(first: int) -> None:
    runs = [backends_that_agree(first + k * GROUPS)["scatter"] for k in range(5)]
    assert sum(runs) > 0, "it refused all cases"


def backends_that_agree(first: int) -> Counter[str]:
    """How many cases of some groups each backend ran, with the numbers and gradients of the oracle."""
    runs: Counter[str] = Counter()
    for seed in range(first, first + GROUPS):
        try:
            check(*draw_group(seed), runs=runs)
        except Failure as failure:
            alone = failure_of(failure.case)
            again = f"check(*draw_group({seed})) fails only as a whole: {failure}"
            pytest.fail(again if alone is None else paste(shrink(alone)), pytrace=False)
    return runs


def a_case(**changes: Any) -> Case:
    """Plain causal attention over five nodes."""
    return {
        "seed": 1,
        "graph": {"rule": ["causal"], "num_dst": 5, "num_src": 5, "changes": []},
        "batch": [2],
        "heads": 2,
        "dtype": "float64",
        "value": {"heads": 2, "width": 3},
        "score": {"kind": "dot", "width": 4, "key_heads": 2, "scale": 0.5, "softcap": None, "edge_key": None},
        "bias": [],
        "edge_value": None,
        "sinks": False,
        "normalize": "softmax",
        "dropout": 0.0,
        "dropout_seed": 0,
        "reduce": "sum",
        "return_weights": False,
        "grad": ["value", "query", "key"],
        "layout": {},
        "upstream": "ones",
        "threads": 1,
        "repeat": False,
        "auto": False,
        "reference": True,
        **changes,
    }


def test_the_oracle_agrees_with_torch() -> None:
    case = a_case()
    edges = edges_of(case["graph"])
    x = leaves(case, edges)
    q, k, v = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5).transpose(1, 2)
    answer = solve(case, edges, x, torch.ones_like(out))
    # five float64 terms of size 1: the two sums differ by less than 5 * 2^-53 each, many times over
    torch.testing.assert_close(answer.numbers["out"], out.detach(), rtol=1e-14, atol=1e-14)
    for name in ("query", "key", "value"):
        (gradient,) = torch.autograd.grad(out.sum(), x[name], retain_graph=True)
        torch.testing.assert_close(answer.numbers[f"d {name}"], gradient, rtol=1e-13, atol=1e-13)
        assert float(answer.bars[f"d {name}"].max()) < 1e-11  # a bar that everything passes is none


def test_topologies_by_hand() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert matrix_of(["&", ["causal"], ["window", 1, 1]], 4, 4)[0].astype(int).tolist() == expected
    assert matrix_of(["memory", 2], 2, 4)[0].astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_chosen_edges_and_trees_by_hand() -> None:
    tree = edges_of({"parent": [-1, 0, 1, 0, 3], "radius": 1, "num_dst": 5, "num_src": 5})
    assert tree.matrix().astype(int).tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 1, 1]
    ]  # fmt: skip
    assert tree.dst_position.tolist() == [0, 1, 2, 1, 2]
    size: dict[str, Any] = {"num_dst": 3, "num_src": 3}
    sources = {"choice": [0, 0, 1, -1, 2, 0], "stack": [], "rows": 3, "size": None, "rule": None, **size}
    assert edges_of(sources).matrix().astype(int).tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    blocks = {"choice": [0, 1, -1, 0], "stack": [2], "rows": 2, "size": 2, "rule": ["causal"], **size}
    assert edges_of(blocks).matrix().astype(int).tolist() == [
        [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]], [[[0, 0, 0], [0, 0, 0], [1, 1, 0]]]
    ]  # fmt: skip


def _after(exact: Any, scale: float) -> Any:
    return lambda *inputs: exact(*inputs) * scale


@pytest.mark.parametrize("planted", ["stack", "choice", "tree", "softmax_dst"])
def test_an_error_of_each_kind_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ten-thousandth in the results of stacks or in the sums of sources; an edge of a tree, or of a choice."""
    if planted == "stack":
        monkeypatch.setattr(fold_stacked, "_to_heads", _after(fold_stacked._to_heads, 1.0001))
    elif planted == "softmax_dst":
        monkeypatch.setattr(softmax_dst, "_lse", _after(softmax_dst._lse, 1.0001))
    elif planted == "tree":
        paths = trees.paths
        monkeypatch.setattr(trees, "paths", lambda parent: paths(np.append(parent[:-1], -1)[: len(parent)]))
    else:
        chosen = graphs.chosen
        monkeypatch.setattr(graphs, "chosen", lambda indices, num_src: chosen(indices[..., 1:], num_src))
    for seed in range(300):
        group = draw_group(seed, 4)
        spec, kinds = group[0]["graph"], {case["normalize"] for case in group}
        is_one = {"stack": bool(spec.get("stack")), "choice": "choice" in spec, "tree": "parent" in spec}
        if not is_one.get(planted, planted in kinds):
            continue
        try:
            check(*group)
        except Failure as failure:
            small = shrink(failure, 300)
            assert len(edges_of(small.case["graph"]).dst) <= len(edges_of(spec).dst)
            return
    pytest.fail(f"an error planted in {planted} was not found")


def test_dropout_drops_about_as_many_as_it_should() -> None:
    bits = drop_hash(2**61 + 5, np.arange(4)[:, None, None], np.arange(100)[:, None], np.arange(100))
    share = (bits < 0.3 * 2**32).mean()  # of 40,000 draws: a standard deviation of 0.0023
    assert abs(share - 0.3) < 5 * 0.0023


def test_a_planted_error_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    right = csr.run

    def wrong(request: Any) -> Any:
        """As csr, but heads beyond the first are a ten-thousandth too large where a row has three edges or more."""
        found = right(request)
        most = int(request.graph.degree().max()) if request.graph.num_dst else 0
        return found._replace(out=found.out * 1.0001) if most >= 3 and request.heads > 1 else found

    monkeypatch.setattr(csr, "run", wrong)
    found = None
    for seed in range(40):
        try:
            check(*draw_group(seed))
        except Failure as failure:
            found = failure
            break
    assert found is not None
    small = shrink(found)
    assert small.backend in ("csr", "auto", "public")
    assert len(edges_of(small.case["graph"]).dst) <= 12
    assert small.case["heads"] > 1
    assert not small.case["dropout"]
    lines = paste(small).splitlines()
    assert len(lines) == 5
    scope: dict[str, Any] = {}
    exec(lines[3], {"json": json}, scope)
    assert scope["case"] == small.case
