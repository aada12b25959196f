"""Convolutions of PyTorch Geometric on mpnn's kernels: `use` in place, `from_pyg` as an operator over a `Graph`."""

from mpnn.integrations.pyg.convert import from_pyg

__all__ = ["from_pyg"]
