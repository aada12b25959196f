"""Triton kernels along the rows of a sparse graph, for GPUs.

The layout, and the sources of its ideas:

- One pass computes logits, an online softmax and the weighted sum: FlashAttention (Dao et al. 2022), for lists of
  neighbors as in Fused3S (Li & Chandramowlishwaran 2025). No E x D tensor is materialized.
- Rows are distributed by length. A program of one warp takes one or a few rows of about the same length; wider ones
  would wait for each other where tiles change their layout. Long rows are cut into pieces, whose partial results a
  second, small kernel joins. DF-GNN (Liu et al. 2024) makes this choice between
  parallel nodes and parallel edges for each graph; here it is made for each row.
- The backward pass computes weights again from the log-sum-exp of each row instead of storing E x H weights: dgNN
  (Zhang et al. 2022). Features are gathered anyway, and the arithmetic on top is free.
- Gradients of sources are sums over the transposed graph in a fixed order, without atomics, so every run gives the same
  bits.
- No tensor cores, unlike Fused3S and FlashSparse (Shi et al. 2025), which collect the neighbors of 16 or 8 rows into
  dense blocks. An edge of an irregular graph takes about one operation for each byte that it gathers, a GPU has over
  ten to spare, and rows of such graphs share few neighbors. Graphs whose rows share many are structured; the backends
  `dense` and `tiles` run them.

Files: `logits` (what happens at an edge), `forward` and `backward` (attention), `aggregate` (aggregation), `attention`
and `reduce` (the differentiable functions of tensors).
"""
