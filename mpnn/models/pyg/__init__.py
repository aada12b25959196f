"""Convolutions of PyTorch Geometric, run as message passing: `from_pyg`, and one file for each family."""

from mpnn.models.pyg.convert import CONVOLUTIONS, from_pyg

__all__ = ["CONVOLUTIONS", "from_pyg"]
