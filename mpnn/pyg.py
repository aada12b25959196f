"""Models of PyTorch Geometric on mpnn's kernels, in place.

import mpnn.pyg

report = mpnn.pyg.use(model)      conv(x, edge_index, ...) stays as it is
report.restore()
"""

from mpnn.graph.registry import install

try:
    from mpnn.integrations.pyg.use import Report, use
except ModuleNotFoundError as error:
    if error.name != "torch_geometric":
        raise
    message = f"mpnn.pyg needs PyTorch Geometric, which is not installed; run: {install('pyg')}"
    raise ModuleNotFoundError(message, name=error.name) from None

__all__ = ["Report", "use"]
