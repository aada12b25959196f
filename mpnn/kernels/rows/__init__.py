"""Attention and aggregation along the rows of a sparse graph, whose edges are sorted by row (CSR).

`attention.py` computes attention, `reduce.py` sums, means, extremes and squares, `combine.py` a user's own
`combine(a, b)` by numba, `edge_sum.py` functions of edges that are summed up, `scatter.py` the functions of
torch_scatter. `rows.py` holds the edges of a call and their division among threads, `spec.py` the numbers of scores and
normalizers. Loops: `../cpu/row_attention.cpp`, `../cpu/row_reduce.cpp`, `../cpu/scatter.cpp`, and `cuda/` by Triton.

The backend `csr` calls `attention.py` and `reduce.py`; `tiles` joins split rows by `attention.py`. The twin that tests
compare with is the backend `edge_list`.
"""

from mpnn.kernels.rows import edge_sum
from mpnn.kernels.rows.scatter import match, row_extremes, row_products, row_squares, row_sums, rows_at

__all__ = ["edge_sum", "match", "row_extremes", "row_products", "row_squares", "row_sums", "rows_at"]
