"""Reads numeric data from an old pickle without running code from it.

A pickle is a program: it names functions, and unpickling calls them. Even a pickle without calls can allocate unlimited
memory. The Planetoid files need only six names, all for plain data. This module therefore interprets only the
instructions that plain data needs, in time and memory linear in the size of the file. Each of the six names is replaced
by a passive class or function of this module, and any other name is refused. Numpy and scipy objects are constructed
afterwards, with checks.
"""

from __future__ import annotations

import pickletools
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mpnn.data.errors import DamagedFile, UnsafePickle
from mpnn.data.read import read_bytes

_DENSE = 64  # maximum elements per byte of the file; Planetoid files have 2 to 15


def load_plain(path: Path) -> Any:
    """The array, sparse matrix, or dictionary of lists in a (Python 2) pickle.

    Raises:
        UnsafePickle: if the file refers to any other function or class. No code was run.
        DatasetNotFound: if the file does not exist.
        DamagedFile: if the file is truncated or not a pickle.
    """
    program = read_bytes(path)
    try:
        return _to_numpy(_interpret(program), len(program))
    except UnsafePickle as refusal:
        raise UnsafePickle(f"{path}: {refusal}") from None
    # A damaged pickle can fail in any instruction, with nearly any exception.
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DamagedFile(
            f"{path} is truncated or not a Planetoid file ({why}); delete it and fetch it again"
        ) from error


class _Dtype:
    """Stands in for `numpy.dtype`."""

    def __init__(self, code: str, align: object = False, copy: object = False) -> None:
        if not re.fullmatch(r"[iuf][1248]", code):
            raise UnsafePickle(f"the pickle holds an array of dtype {code[:20]!r}; only plain numbers are read")
        self.code = code
        self.byte_order = "="

    def build(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "=", "|"):
            raise ValueError("unknown byte order")
        self.byte_order = state[1]

    def numpy(self) -> np.dtype:
        return np.dtype(self.byte_order + self.code)


class _Array:
    """Stands in for `numpy.ndarray`; its state is (version, shape, dtype, is_fortran, bytes)."""

    def build(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.raw = state

    def numpy(self) -> np.ndarray:
        flat = np.frombuffer(self.raw.encode("latin1"), self.dtype.numpy())
        shape = _sizes(self.shape)
        if prod(shape) != len(flat) or (len(flat) == 0 and shape[0] != 0):
            raise ValueError(f"an array of {len(flat)} numbers has another shape")
        array = flat.reshape(shape, order="F" if self.is_fortran else "C")
        return array.astype(array.dtype.newbyteorder("="))


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in shape):  # text * integer would be a long text
        raise ValueError("a shape contains something other than a size")
    return shape


class _CsrMatrix:
    """Stands in for `scipy.sparse.csr_matrix`; its state is a dictionary of arrays."""

    def build(self, state: dict[str, Any]) -> None:
        self.state = state

    def scipy(self, bytes_in_file: int) -> sp.csr_matrix:
        rows, columns = _sizes(self.state["_shape"])
        if rows * columns > _DENSE * bytes_in_file:
            raise ValueError(f"a matrix of {rows} x {columns} in a file of {bytes_in_file} bytes")
        data, indices, indptr = (self.state[key].numpy() for key in ("data", "indices", "indptr"))
        if ((indptr < 0) | (indptr > len(indices))).any():  # scipy's check subtracts them, which may overflow
            raise ValueError("a row of a sparse matrix is out of range")
        matrix = sp.csr_matrix((data, indices, indptr), shape=(rows, columns))
        matrix.check_format(full_check=True)
        return matrix


def _reconstruct(subtype: object, shape: object, code: object) -> _Array:
    return _Array()


def _defaultdict(factory: object = None) -> dict[Any, Any]:
    return {}


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("scipy.sparse.csr", "csr_matrix"): _CsrMatrix,
    ("collections", "defaultdict"): _defaultdict,
    ("__builtin__", "list"): list,
}
_CALLABLE = (_Dtype, _reconstruct, _CsrMatrix, _defaultdict)


def _resolve(module: str, name: str) -> Any:
    if (module, name) not in _ALLOWED:
        raise UnsafePickle(
            f"the pickle asks for {module[:60]}.{name[:60]}, which no Planetoid file needs; it was refused and "
            f"no code was run; fetch the file again from its source"
        )
    return _ALLOWED[module, name]


_IGNORED = {"PROTO", "FRAME"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
_ARGUMENTS |= {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _interpret(program: bytes) -> Any:
    """Runs the program and returns the top of its stack. Arguments of instructions are bytes of the program, so each
    instruction takes time linear in its length."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def pop(count: int) -> list[Any]:
        if count > len(stack) - (marks[-1] if marks else 0):
            raise ValueError("an instruction finds too little on the stack")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    def pop_to_mark() -> list[Any]:
        items = pop(len(stack) - marks[-1])
        marks.pop()
        return items

    for instruction, argument, _ in pickletools.genops(program):
        match instruction.name:
            case "STOP":
                return pop(1)[0]
            case name if name in _IGNORED:
                pass
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _ARGUMENTS:
                if isinstance(argument, int) and argument.bit_length() > 64:
                    raise ValueError("an integer of more than 64 bits")
                stack.append(argument)
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case name if name in _TUPLES:
                stack.append(tuple(pop(_TUPLES[name])))
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "LIST":
                stack.append(pop_to_mark())
            case "DICT":
                stack.append(_update_dict({}, pop_to_mark()))
            case "APPEND" | "APPENDS" as name:
                items = pop(1) if name == "APPEND" else pop_to_mark()
                if type(stack[-1]) is not list:
                    raise TypeError("appends to something that is not a list")
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = pop(2) if name == "SETITEM" else pop_to_mark()
                _update_dict(stack[-1], items)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_resolve(*str(argument).split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_resolve(*pop(2)))
            case "REDUCE" | "NEWOBJ":
                function, arguments = pop(2)
                if not any(function is allowed for allowed in _CALLABLE):
                    raise TypeError("calls something that is not a function")
                stack.append(function(*arguments))
            case "BUILD":
                (state,) = pop(1)
                if not isinstance(stack[-1], (_Dtype, _Array, _CsrMatrix)):
                    raise TypeError("sets the state of something without a state")
                stack[-1].build(state)
            case name:
                raise ValueError(f"plain data needs no {name}")
    raise ValueError("the pickle does not end")


def _update_dict(target: Any, items: list[Any]) -> dict[Any, Any]:
    """Adds alternating keys and values to the dictionary `target`."""
    keys = items[::2]
    if type(target) is not dict or len(items) % 2:
        raise TypeError("sets items of something that is not a dictionary")
    if not all(isinstance(key, (int, str)) for key in keys):  # hashing nested tuples can take exponential time
        raise TypeError("a key is neither an integer nor text")
    target.update(zip(keys, items[1::2], strict=True))
    return target


def _to_numpy(loaded: object, bytes_in_file: int) -> Any:
    if isinstance(loaded, _Array):
        return loaded.numpy()
    if isinstance(loaded, _CsrMatrix):
        return loaded.scipy(bytes_in_file)
    if isinstance(loaded, dict):
        if sum(map(len, loaded.values())) > bytes_in_file:
            raise ValueError("its lists, some of them shared, have more items than the file has bytes")
        return {key: list(values) for key, values in loaded.items()}
    raise TypeError(f"holds a {type(loaded).__name__}")
