"""What `ops.attend` is called with, in programs too."""

import pytest
import torch

from mpnn import graphs, ops


@pytest.mark.slow
def test_a_scale_made_of_a_size_that_a_program_does_not_know_yet():
    graph = graphs.causal().bind(3)

    def halved(x):
        return ops.attend(graph, x, x, x, scale=0.5 * x.shape[-1] ** -0.5)

    program = torch.compile(halved, fullgraph=True, dynamic=True, backend="aot_eager")
    for width in (4, 6):
        x = torch.randn(3, 2, width)
        torch.testing.assert_close(program(x), halved(x))
