"""Triton kernels for sparse graphs on GPUs, one file an idea, as in `mpnn.kernels.cpu`.

How they are laid out, and whose ideas these are:

- One pass for scores, normaliser and weighted sum, the softmax an online one: FlashAttention (Dao et al. 2022), for
  lists of neighbours as in Fused3S (Li & Chandramowlishwaran 2025). Nothing of E x D is made.
- Two ways of sharing out rows at once, chosen by their lengths: short rows go several to a program, each a row of the
  program's tile; long ones are cut into pieces, whose partial results a second, small kernel puts together. This is
  DF-GNN's choice between parallel nodes and parallel edges (Liu et al. 2024), made for each row instead of each graph.
- The backward pass computes weights again from the rows' logarithms of sums, instead of storing E x H of them: dgNN
  (Zhang et al. 2022). A gather of features is needed anyway, and arithmetic on top of it is free.
- Gradients of sources are sums over the transposed graph, in a fixed order. No atomics, so every run gives the same
  bits.
- No tensor cores, unlike Fused3S and FlashSparse (Shi et al. 2025), which collect the neighbours of 16 or 8 rows into
  dense blocks: an edge of an irregular graph takes about one operation for each byte that it gathers, a GPU has over
  ten to spare, and rows of such graphs have few neighbours in common. Graphs whose rows have many are structured, and
  belong to the backends `dense` and `tiles`.

Importing this package imports Triton, so it is imported where a kernel is first needed. With `TRITON_INTERPRET=1` the
same code runs on CPU tensors, which is how it is tested.
"""
