"""Reads the numbers out of an old pickle without running any of it.

A pickle is a program: it names functions, and unpickling calls them. The Planetoid files need six names,
all for plain data. Here each of the six is a passive stand-in written in this file, every other name is
refused before anything is looked up, and the stand-ins are turned into numpy and scipy objects afterwards,
with checks. So the file neither reaches a function it could misuse nor depends on how today's numpy and
scipy happen to lay out their objects.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mpnn.data.errors import DamagedFile, UnsafePickle


def load_plain(path: Path) -> Any:
    """The array, sparse matrix, or dictionary of lists in a (Python 2) pickle.

    Raises:
        UnsafePickle: the file names anything else; nothing of it was run.
        DamagedFile: the file is truncated or is no pickle.
    """
    try:
        with path.open("rb") as file:
            return _finish(_PlainUnpickler(file, encoding="latin1").load())
    except UnsafePickle as refusal:
        raise UnsafePickle(f"{path}: {refusal}") from None
    except OSError:
        raise
    # A damaged pickle can fail in any opcode, hence with nearly any exception.
    except Exception as error:
        raise DamagedFile(
            f"{path} is truncated or not a Planetoid file ({type(error).__name__}: {error}); "
            f"delete it and fetch it again"
        ) from error


class _Dtype:
    """Stands in for `numpy.dtype`."""

    def __init__(self, code: str, align: object = False, copy: object = False) -> None:
        if not re.fullmatch(r"[iuf][1248]", code):
            raise UnsafePickle(f"the pickle holds an array of dtype {code!r}; only plain numbers are read")
        self.code = code
        self.byte_order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "=", "|"):
            raise ValueError(f"byte order {state[1]!r}")
        self.byte_order = state[1]

    def numpy(self) -> np.dtype:
        return np.dtype(self.byte_order + self.code)


class _Array:
    """Stands in for `numpy.ndarray`; its state is (version, shape, dtype, is_fortran, bytes)."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.raw = state

    def numpy(self) -> np.ndarray:
        flat = np.frombuffer(self.raw.encode("latin1"), self.dtype.numpy())
        array = flat.reshape(self.shape, order="F" if self.is_fortran else "C")
        return array.astype(array.dtype.newbyteorder("="))


class _CsrMatrix:
    """Stands in for `scipy.sparse.csr_matrix`; its state is a dictionary of arrays."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state

    def scipy(self) -> sp.csr_matrix:
        data, indices, indptr = (self.state[key].numpy() for key in ("data", "indices", "indptr"))
        matrix = sp.csr_matrix((data, indices, indptr), shape=self.state["_shape"])
        matrix.check_format(full_check=True)
        return matrix


def _reconstruct(subtype: object, shape: object, code: object) -> _Array:
    return _Array()


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("scipy.sparse.csr", "csr_matrix"): _CsrMatrix,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UnsafePickle(
                f"the pickle asks for {module}.{name}, which no Planetoid file needs; it was refused and "
                f"nothing was run; fetch the file again from its source"
            )
        return _ALLOWED[module, name]


def _finish(loaded: object) -> Any:
    if isinstance(loaded, _Array):
        return loaded.numpy()
    if isinstance(loaded, _CsrMatrix):
        return loaded.scipy()
    if isinstance(loaded, dict):
        return {key: list(values) for key, values in loaded.items()}
    raise TypeError(f"holds a {type(loaded).__name__}")
