"""Models of PyTorch Geometric on mpnn's kernels, in place.

import mpnn.pyg

report = mpnn.pyg.use(model)      conv(x, edge_index, ...) stays as it is
report.restore()
"""

from mpnn.integrations.pyg.use import Report, use

__all__ = ["Report", "use"]
