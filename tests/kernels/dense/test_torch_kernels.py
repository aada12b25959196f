"""What torch's kernels for CUDA are given: where sequences laid end to end begin."""

import torch

from mpnn.kernels.dense import varlen


def test_groups_laid_end_to_end_begin_where_the_last_one_ends():
    sizes = torch.tensor([2, 3])
    assert varlen.starts(sizes, 1).tolist() == [0, 2, 5]
    assert varlen.starts(sizes, 2).tolist() == [0, 2, 5, 7, 10]
    assert varlen.starts(sizes, 1).dtype == torch.int32
    on_cpu = torch.zeros(5, 2, 8, dtype=torch.bfloat16)
    assert not varlen.runs_here(on_cpu, on_cpu)
