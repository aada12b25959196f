"""What `ops.attend` is called with, in programs too."""

from typing import Any

import pytest
import torch

from mpnn import graphs, ops
from mpnn.aggregate import segment_sum


def test_sinks_are_one_more_source_with_value_zero() -> None:
    graph = graphs.causal().bind(4)
    q, k, v = torch.randn(3, 2, 4, 2, 3)
    sinks = torch.tensor([0.5, -2.0])
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * 3**-0.5
    logits = (5.0 * (logits / 5.0).tanh()).masked_fill(~graph.dense(), -torch.inf)
    with_sink = torch.cat([logits, sinks.view(1, 2, 1, 1).expand(2, 2, 4, 1)], -1).softmax(-1)[..., :-1]
    out, weights = ops.attend(graph, q, k, v, softcap=5.0, sinks=sinks, return_weights=True)
    src, dst = graph.edge_index
    torch.testing.assert_close(weights, with_sink[..., dst, src].mT)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", with_sink, v))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sinks": torch.zeros(3)}, "sinks must have shape \\[2\\], a logit for each head; got \\[3\\]"),
        ({"sinks": torch.zeros(2), "normalize": "sigmoid"}, "sinks are logits of a softmax"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks must be floating point"),
        ({"sinks": 0.5}, "sinks must be a tensor; got float"),
        ({"softcap": -1.0}, "softcap must be a positive finite number"),
    ],
)
def test_sinks_and_softcap_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    x = torch.randn(4, 2, 3)
    with pytest.raises((TypeError, ValueError), match=message):
        ops.attend(graphs.causal().bind(4), x, x, x, **changes)


@pytest.mark.slow
def test_sinks_in_a_program() -> None:
    graph = graphs.causal().bind(5)
    x, sinks = torch.randn(5, 2, 3, requires_grad=True), torch.randn(2, requires_grad=True)

    def attend(x: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return ops.attend(graph, x, x, x, softcap=2.0, sinks=sinks)

    program = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected, out = attend(x, sinks), program(x, sinks)
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(y.square().sum(), (x, sinks)) for y in (out, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_a_scale_made_of_a_size_that_a_program_does_not_know_yet():
    graph = graphs.causal().bind(3)

    def halved(x):
        return ops.attend(graph, x, x, x, scale=0.5 * x.shape[-1] ** -0.5)

    program = torch.compile(halved, fullgraph=True, dynamic=True, backend="aot_eager")
    for width in (4, 6):
        x = torch.randn(3, 2, width)
        torch.testing.assert_close(program(x), halved(x))


@pytest.mark.parametrize("reduce", ["max", "std", "median", "softmax", "pna", lambda m, i: segment_sum(m * m, i)])
def test_attend_with_any_aggregator(reduce: Any) -> None:
    graph = graphs.window(2).bind(9)
    features = [torch.randn(2, 9, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    options: dict[str, Any] = {"reduce": reduce, "softcap": 2.0, "sinks": torch.zeros(4, dtype=torch.float64)}

    def run(backend: str) -> list[torch.Tensor]:
        out, weights = ops.attend(graph, *features, return_weights=True, backend=backend, **options)
        return [out, weights, *torch.autograd.grad(out.sin().sum(), features)]

    torch.testing.assert_close(run("auto"), run("edge_list"))
    options["reduce"] = "sum"
    assert not torch.allclose(run("auto")[0], ops.attend(graph, *features, reduce="max"))
