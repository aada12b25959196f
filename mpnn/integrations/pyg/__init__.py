"""`from_pyg`: converts convolutions of PyTorch Geometric to message passing. One file for each family."""

from mpnn.integrations.pyg.convert import CONVOLUTIONS, from_pyg

__all__ = ["CONVOLUTIONS", "from_pyg"]
