"""The numbers by which kernels along rows know scores and normalizers, on CPU (`kernels/cpu/row_attention.cpp`) and
GPU."""

CONSTANT = 0
DOT = 1
ADDITIVE = 2
ACTIVATED = 3
NORMALIZERS = {"softmax": 0, "sigmoid": 1, "none": 2}
