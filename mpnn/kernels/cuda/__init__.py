"""Shared by the Triton kernels of several families: `tensors` (loads and stores of tiles), `dropout` (which edges are
kept), `schedule` (which program takes which rows, and how many at once), `launch` (later calls of the same shapes start
what the first compiled).

Importing `tensors` or a kernel imports Triton, so backends import them when they first need a kernel. With
`TRITON_INTERPRET=1` the same code runs on CPU tensors; the tests use this.
"""
