"""Fused kernels as differentiable functions of tensors; the compiled code behind them is in a folder per device."""
