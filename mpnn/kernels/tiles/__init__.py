"""Attention over the tiles of a structured graph: blocks of queries and keys that hold edges.

`attention.py` is the differentiable function on CPU, with its loops in `../cpu/tile_attention.cpp`. On CUDA it is
`cuda/attention.py`: `cuda/schedule.py` lists the tiles, `cuda/config.py` chooses their sizes, `cuda/forward.py`,
`cuda/backward.py` and `cuda/pairs.py` hold the loops in Triton.

The backend `tiles` calls both. The twin that tests compare with is the backend `edge_list`.
"""
