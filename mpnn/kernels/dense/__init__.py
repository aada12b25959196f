"""Functions of dense tensors: `onednn.py` (products by oneDNN), `varlen.py` (torch's attention over packed documents),
`pair_tables.py` (products with tables of relative positions), `random_features.py` (random features),
`feature_dropout.py` and `permutation.py`. They are made of torch's operations; the loop of dropout is in
`../cpu/feature_dropout.cpp`.

The backend `dense` calls `varlen.py` and `pair_tables.py`; updates, attention specs and rewrites call the others. The
twins are torch's own operations.
"""

from mpnn.kernels.dense import onednn, varlen
from mpnn.kernels.dense.feature_dropout import drop_features, drops_features
from mpnn.kernels.dense.permutation import permute
from mpnn.kernels.dense.random_features import positive_features

__all__ = ["drop_features", "drops_features", "onednn", "permute", "positive_features", "varlen"]
