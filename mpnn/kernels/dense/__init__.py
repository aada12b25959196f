"""Functions of dense tensors: `linear.py` (products by oneDNN), `varlen.py` (torch's attention over packed documents),
`pair_tables.py` (products with tables of relative positions), `positive_features.py` (random features),
`feature_dropout.py` and `permutation.py`. They are made of torch's operations; the loop of dropout is in
`../cpu/feature_dropout.cpp`.

The backend `dense` calls `varlen.py` and `pair_tables.py`; updates, attention specs and rewrites call the others. The
twins are torch's own operations.
"""
