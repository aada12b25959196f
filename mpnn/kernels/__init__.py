"""Fused kernels as differentiable functions of tensors, a folder for each family. They do not know graphs.

- `rows/`: attention and aggregation along the rows of a sparse graph
- `tiles/`: attention over the tiles of a structured graph
- `dense/`: products, and functions of each row or pair of dense tensors
- `recurrent/`: running sums with gates, the delta rule, selective scans and short convolutions
- `layers/`: whole transformer layers in one call
- `edges/`: lists of edges: sorting, sampling

`cpu/` holds the C++ of all families, since one library with shared headers is compiled from it, its loader and its
threads; `cuda/` what the Triton code of several families shares. A module of a family checks and prepares tensors, and
holds the `torch.autograd.Function`; its `cuda/` folder holds the loops in Triton.
"""
