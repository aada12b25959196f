"""The numbers by which kernels along rows know scores and normalizers, on CPU (`kernels/cpu/row_attention.cpp`) and
GPU."""

CONSTANT, DOT, ADDITIVE, ACTIVATED = 0, 1, 2, 3
NORMALIZERS = {"softmax": 0, "sigmoid": 1, "none": 2}
