"""Triton kernels of structured graphs, on tensor cores, over tiles of pairs: `schedule` (which tiles hold edges, and
which program visits which of them), `pairs` (what happens at a pair), `forward`, `backward`, `config` (sizes) and
`attention` (the differentiable function)."""
