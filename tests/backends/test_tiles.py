"""Tiles at the ends of the number range, where masks are written as very low biases."""

import pytest
import torch

from mpnn import graphs, ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("low", ["finfo.min", -1e31], ids=str)
@pytest.mark.parametrize("backend", ["edge_list", "tiles", "csr"])
def test_a_row_of_biases_that_are_low_but_finite_is_heard(dtype: torch.dtype, low: object, backend: str) -> None:
    graph = graphs.causal().bind(40)
    bias = torch.zeros(graph.num_edges, 1, dtype=dtype)
    bias[graph.edge_index[1] == 37] = torch.finfo(dtype).min if low == "finfo.min" else low
    features, value = torch.zeros(40, 1, 8, dtype=dtype), torch.randn(40, 1, 8, dtype=dtype)
    out = ops.attend(graph, features, features, value, bias=bias, backend=backend)
    torch.testing.assert_close(out[37], value[:38].mean(0))
