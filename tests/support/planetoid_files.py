"""Small files in Planetoid's format.

Their pickles are written opcode by opcode, in Python 2's protocol: today's pickle module writes other names for the
same things.
"""

import struct
from hashlib import sha256

import numpy as np
import pytest

from mpnn.data import RemoteFile, Source


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def number(value):
    return b"J" + struct.pack("<i", value)


def text(value):
    return b"U" + bytes([len(value)]) + value


def sequence(opcode, *items):
    return b"(" + b"".join(items) + opcode


def array(values, code):
    values = np.asarray(values, np.dtype(code))
    dtype = name("numpy", "dtype") + sequence(b"t", text(code.encode()), number(0), number(1)) + b"R"
    dtype += sequence(b"t", number(3), text(b"<"), b"NNN", number(-1), number(-1), number(0)) + b"b"
    empty = name("numpy.core.multiarray", "_reconstruct")
    empty += sequence(b"t", name("numpy", "ndarray"), sequence(b"t", number(0)), text(b"b")) + b"R"
    shape = sequence(b"t", *map(number, values.shape))
    raw = b"T" + struct.pack("<i", values.nbytes) + values.tobytes()
    return empty + sequence(b"t", number(1), shape, dtype, b"I00\n", raw) + b"b"


def csr(rows, columns):
    indices = [j for row in rows for j in row]
    indptr = np.cumsum([0] + [len(row) for row in rows])
    state = (
        (b"_shape", sequence(b"t", number(len(rows)), number(columns))),
        (b"data", array(np.ones(len(indices)), "f4")),
        (b"indices", array(indices, "i4")),
        (b"indptr", array(indptr, "i4")),
    )
    items = b"".join(text(key) + value for key, value in state)
    return name("scipy.sparse.csr", "csr_matrix") + b")\x81}" + sequence(b"u", items) + b"b"


def neighbor_lists(lists):
    start = name("collections", "defaultdict") + sequence(b"t", name("__builtin__", "list")) + b"R"
    items = b"".join(number(i) + sequence(b"l", *map(number, others)) for i, others in lists.items())
    return start + sequence(b"u", items)


def program(body):
    return b"\x80\x02" + body + b"."


@pytest.fixture
def small_planetoid(tmp_path):
    """Six nodes, two words, two classes: one for training, nodes 4 and 5 for testing, listed as 5, 4."""
    files = {
        "x": csr([[0]], 2),
        "y": array([[1, 0]], "i4"),
        "allx": csr([[0], [1], [0, 1], []], 2),
        "ally": array([[1, 0], [0, 1], [1, 0], [0, 1]], "i4"),
        "tx": csr([[0, 1], [1]], 2),
        "ty": array([[1, 0], [0, 1]], "i4"),
        "graph": neighbor_lists({0: [1, 1, 0], 1: [0, 0], 2: [5], 3: [], 4: [], 5: [2]}),
    }
    for part, body in files.items():
        (tmp_path / f"ind.small.{part}").write_bytes(program(body))
    (tmp_path / "ind.small.test.index").write_text("5\n4\n")
    return tmp_path


def source(folder):
    """A dataset `small` of the files in the folder, with the digests that they have now."""
    files = (RemoteFile(path.name, sha256=sha256(path.read_bytes()).hexdigest()) for path in sorted(folder.iterdir()))
    return Source("small", "small", tuple(files), "https://example.org", "write it", "MIT", "nobody")
