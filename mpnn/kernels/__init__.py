"""Fused kernels as differentiable functions of tensors. The compiled code is in one folder per device."""
