"""Reads the pickles of the Planetoid datasets.

A pickle is a program, and unpickling runs it. So only bytes with a known digest are unpickled, and then by an unpickler
that refuses every name but the six that arrays, sparse matrices and dictionaries of lists need.
"""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mpnn.data.read import read_verified


def load_plain(path: Path, sha256: str) -> Any:
    """The array, sparse matrix, or dictionary of lists in a pickle of Python 2 with this digest."""
    return _Unpickler(BytesIO(read_verified(path, sha256)), encoding="latin1").load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which plain data do not need")
        return _ALLOWED[module, name]


_ALLOWED = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],  # moved within numpy since
    ("scipy.sparse.csr", "csr_matrix"): sp.csr_matrix,
    ("collections", "defaultdict"): lambda factory: {},
    ("__builtin__", "list"): list,
}
