"""The log-sum-exp of logits, and attention over disjoint sets of sources merged by it."""

import pytest
import torch

from mpnn import graphs, ops
from mpnn.graph import Graph
from mpnn.position import ALiBi

BACKENDS = ("edge_list", "csr", "tiles")
EDGES = torch.tensor([[0, 3, 3, 5, 1, 1, 6, 2], [1, 1, 4, 4, 4, 4, 2, 6]])  # an edge occurs twice, rows are empty
GRAPHS = {
    "causal window": (graphs.causal() & graphs.window(3)).bind(40),
    "identity": graphs.identity().bind(7),
    "later rows": (graphs.causal() - graphs.identity()).bind(9),  # the first has no source
    "edges": graphs.from_edges(EDGES, 7),
}


def features(graph: Graph, *batch: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (graph.num_dst, 4), (graph.num_src, 2), (graph.num_src, 2)
    return [torch.randn(*batch, *shape, 8, dtype=dtype, requires_grad=True) for shape in shapes]


def expected(graph: Graph, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both by a loop over destinations."""
    src, dst = graph.edge_index
    key, value = (x.repeat_interleave(2, -2) for x in (key, value))
    out, lse = [], []
    for i in range(graph.num_dst):
        mine = src[dst == i]
        logits = (query[..., i, None, :, :] * key[..., mine, :, :]).sum(-1) * 8**-0.5
        lse.append(logits.logsumexp(-2))
        out.append((logits.softmax(-2)[..., None] * value[..., mine, :, :]).sum(-3))
    return torch.stack(out, -3), torch.stack(lse, -2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_lse_and_its_gradients(backend, name, batch):
    graph = GRAPHS[name]
    if backend == "tiles" and graph.is_explicit:
        pytest.skip("tiles are for structured graphs")
    inputs = features(graph, *batch)
    found = ops.attend(graph, *inputs, backend=backend, return_lse=True)
    right = expected(graph, *inputs)
    for x, y in zip(found, right, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y)
    assert torch.equal(torch.isneginf(found[1]), torch.isneginf(right[1]))
    weights = [torch.randn_like(x) for x in found]
    some = ~torch.isneginf(right[1])  # the gradient of log(0) is not defined

    def gradients(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        out, lse = results
        total = (out * weights[0]).sum() + (lse * weights[1])[some].sum()
        return list(torch.autograd.grad(total, inputs))

    for x, y in zip(gradients(found), gradients(right), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("name", GRAPHS)
def test_merged_parts_are_the_whole(backend, name):
    """Sources in three sets, one of which no destination attends to, with gradients and far logits."""
    graph = GRAPHS[name]
    if backend == "tiles" and graph.is_explicit:
        pytest.skip("tiles are for structured graphs")
    query, key, value = features(graph)
    query.data *= 100  # exp of a logit alone would overflow
    out = ops.attend(graph, query, key, value)
    every = torch.arange(graph.num_src)
    half = graph.num_src // 2
    parts = []
    for mine in (every[:half], every[half:], every[:0]):
        columns = graph.columns(mine)
        parts.append(ops.attend(columns, query, key[mine], value[mine], return_lse=True, backend=backend))
    merged, lse = ops.merge(parts)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(lse, ops.attend(graph, query, key, value, backend="edge_list", return_lse=True)[1])
    weight = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad((merged * weight).sum(), (query, key, value)),
        torch.autograd.grad((out * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_lse_of_float32_and_16_bits():
    graph = GRAPHS["causal window"]
    inputs = [x.float() for x in features(graph)]
    lse = expected(graph, *inputs)[1]
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for backend in BACKENDS:
            found = ops.attend(graph, *(x.to(dtype) for x in inputs), backend=backend, return_lse=True)[1]
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, lse, rtol=bound, atol=bound)


def test_biases_count():
    graph, (query, key, value) = GRAPHS["causal window"], features(GRAPHS["causal window"])
    bias = ALiBi(4).bias(graph)
    lse = [ops.attend(graph, query, key, value, bias=bias, return_lse=True, backend=b)[1] for b in BACKENDS]
    plain = ops.attend(graph, query, key, value, return_lse=True)[1]
    assert not torch.allclose(lse[0], plain)
    for other in lse[1:]:
        torch.testing.assert_close(other, lse[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"normalize": "sigmoid"}, "needs a sum weighted by a softmax"),
        ({"return_weights": True}, "cannot be combined with return_weights"),
        ({"sinks": torch.zeros(4, dtype=torch.float64)}, "cannot be combined with sinks"),
        ({"backend": "dense"}, "torch's kernels do not return lse"),
    ],
)
def test_refusals(options, sentence):
    graph = GRAPHS["identity"]
    with pytest.raises(ValueError, match=sentence):
        ops.attend(graph, *features(graph), return_lse=True, **options)


def test_columns_keep_positions():
    graph = graphs.window(4).bind(20)
    for sources in (torch.arange(6, 13), torch.tensor([0, 3, 4, 19])):
        columns = graph.columns(sources)
        src, dst = graph.edge_index
        kept = torch.isin(src, sources)
        found = columns.edge_index
        assert torch.equal(sources[found[0]], src[kept])
        assert torch.equal(found[1], dst[kept])
        of_dst, of_src = columns.edge_positions()
        assert torch.equal(of_dst - of_src, dst[kept] - src[kept])
        # Consecutive sources need no list of positions, which few kernels read.
        assert (columns.positions is None) == (len(sources) == 7)
    with pytest.raises(ValueError, match="sources must ascend, each once, from 0 to 19"):
        graph.columns(torch.tensor([3, 2]))
    with pytest.raises(ValueError, match=r"sources must be int64 \[n\]"):
        graph.columns(torch.zeros(2))
