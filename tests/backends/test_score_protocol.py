"""A score of one's own, in one file: a learned distance kernel, which every caller runs by its reference."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from capabilities import Distance as PlainDistance
from torch import Tensor, nn
from torch.nn import functional as F

import mpnn
from mpnn import MessagePassing, engine, graphs
from mpnn.attention import DotProduct
from mpnn.graph.edge_tables import PerEdge
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, LeakyReLU, Role

N, HEADS, WIDTH = 9, 4, 6


@dataclass(eq=False)
class Distance:
    """`-softplus(slope) * |query_i - key_j - edge_key_ij|^2`, with a learned slope [H]."""

    query: Tensor
    key: Tensor
    slope: Tensor
    edge_key: PerEdge | None = None

    roles = {"query": Role("dst"), "key": Role("src", grouped=True), "edge_key": Role("edge")}  # noqa: RUF012

    def logits(self, query: Tensor, key: Tensor, edge_key: Tensor | None) -> Tensor:
        difference = query - key if edge_key is None else query - key - edge_key
        return -F.softplus(self.slope) * difference.square().sum(-1)


class DistanceAttention(DotProduct):
    """Attention that is stronger between nodes whose query and key are close."""

    def __init__(self, dim: int, heads: int, **options: Any) -> None:
        super().__init__(dim, heads, **options)
        self.slope = nn.Parameter(torch.zeros(heads))

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, edge_attr: Tensor | None = None) -> Round:
        return Round(graph, value, Distance(query, key, self.slope))


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def request(**fields: Any) -> Round:
    graph = graphs.window(2).bind(N)
    score = Distance(features(2, N, HEADS, WIDTH), features(2, N, HEADS // 2, WIDTH), features(HEADS))
    return Round(graph, features(2, N, HEADS, WIDTH), score, **fields)


def dense_logits(score: Distance) -> Tensor:
    """The logits of all pairs, [..., H, N_dst, N_src]."""
    query, key = (x.movedim(-2, -3) for x in (score.query, score.key))
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return -F.softplus(score.slope)[:, None, None] * torch.cdist(query, key).square()


def dense(request: Round) -> Tensor:
    """Softmax attention over all pairs."""
    weight = dense_logits(request.score).masked_fill(~request.graph.dense(), -torch.inf).softmax(-1)
    return (weight @ request.value.movedim(-2, -3)).movedim(-3, -2)


def test_its_formula() -> None:
    example = request()
    leaves = example.tensors
    out, expected = engine.run(example)[0], dense(example)
    torch.testing.assert_close(out, expected)
    seed = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, seed) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_edge_list_runs_it_and_the_plan_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    op = MessagePassing(graphs.window(2), "sum", None, DistanceAttention(8, 2))
    plan = mpnn.explain(op, torch.randn(N, 8))
    assert plan.backend == "edge_list"
    assert "Distance attention, softmax" in capsys.readouterr().out
    reasons = {c.name: c.reason for c in plan.candidates}
    assert [name for name, reason in reasons.items() if reason is None] == ["edge_list"]
    assert reasons["csr"] == "it has no kernel for Distance, which does not lower to a built-in score"
    with pytest.raises(ValueError, match="backend 'csr' cannot run this: it has no kernel for Distance"):
        engine.run(op.rounds(torch.randn(N, 8))[0], "csr")


def test_compiled_programs() -> None:
    op = MessagePassing(graphs.window(2), "sum", None, DistanceAttention(8, 2))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for n in (N, N + 1):
        x = torch.randn(n, 8)
        out, expected = compiled(x), op(x)
        torch.testing.assert_close(out, expected)
        for ours, theirs in zip(
            *(torch.autograd.grad(y.sum(), op.attention.slope) for y in (out, expected)), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_exported_programs_hold_no_code_of_the_user() -> None:
    op = MessagePassing(graphs.window(2), "sum", None, DistanceAttention(8, 2))
    with pytest.raises(ValueError, match=r"torch\.export cannot save Distance"):
        torch.export.export(op, (torch.randn(N, 8),))


Q = torch.rand(N, HEADS, WIDTH)


# ----------------------------------------------------------------------------------------------------- mistakes


class NotADataclass:
    roles = {"query": Role("dst")}  # noqa: RUF012
    logits = Distance.logits


@dataclass(frozen=True)
class WithoutRoles:
    query: Any

    def logits(self, query: Any) -> Any:
        return query.sum(-1)


class OtherNames(PlainDistance):
    def logits(self, q: Any, k: Any) -> Any:
        return (q * k).sum(-1)


@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        (NotADataclass(), "score must be a dataclass with `roles` and `logits`"),
        (WithoutRoles(Q), "WithoutRoles has no `roles`"),
        (OtherNames(Q, Q), "OtherNames.logits gets the fields of `roles` by name, query, key: "),
        (Distance(Q[:5], Q, torch.rand(HEADS)), "query has 5 nodes"),
        (Distance(Q, Q[:, :3], torch.rand(HEADS)), "4 heads cannot share 3 heads of key"),
        (Distance(Q, Q, torch.rand(3)), "size of tensor a"),
        (Distance(Q, Q, torch.rand(HEADS), torch.rand(3, HEADS, WIDTH)), "edge_key must have shape"),
        (Distance(Q, Q, torch.rand(2, 1, HEADS)), "Distance.logits must return one number for each edge and head"),
        (AdditiveScore(Q[..., 0], Q[:, :1, 0], LeakyReLU()), "src has 1 heads, and the score has 4"),
        (
            AdditiveV2Score(Q, Q, Q[0, :1], LeakyReLU()),
            "dst, src and vector must have the same heads and width",
        ),
        (
            AdditiveV2Score(Q, Q[..., :3], Q[0], LeakyReLU()),
            "dst, src and vector must have the same heads and width",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "edge_list"])
def test_mistakes(score: Any, sentence: str, backend: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(sentence)):
        engine.run(Round(graphs.window(2).bind(N), Q, score), backend)
