"""Data files that were made to harm, or damaged at random: each ends in a data error with a sentence, or loads, in
bounded time and memory."""

from __future__ import annotations

import gzip
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import mutated
from planetoid_files import array, csr, name, neighbor_lists, number, program, sequence, text
from planetoid_files import small_planetoid as small_planetoid
from tu_files import TWO_GRAPHS

from mpnn.data import DamagedFile, DatasetNotFound, UnsafePickle, locate, multi30k, tu
from mpnn.data.pickles import load_plain
from mpnn.data.planetoid import read_planetoid
from mpnn.data.text import read_gzip_lines
from mpnn.data.tu import read_tu

Read = Callable[[], Any]


def attempt(read: Read) -> str | None:
    """What the data error says; None where the file is read. Other errors, and much time or memory, fail the test."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentence = None
    try:
        read()
    except (DamagedFile, DatasetNotFound, UnsafePickle) as error:
        sentence = str(error)
    assert time.process_time() - start < 5  # an attack takes minutes, and a shared processor some tenths more
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB
    assert sentence is None or (len(sentence) < 1000 and "\n" not in sentence)
    return sentence


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def nested(depth: int, joined: bytes) -> bytes:
    """A tuple of twice the same tuple, and so on: few bytes, 2 ** depth leaves."""
    return b")" + b"".join(put(k) + b"j" + struct.pack("<I", k) + joined for k in range(depth))


def shaped(shape: tuple[bytes, ...], raw: bytes = b"") -> bytes:
    """An int32 array of any shape."""
    whole = array([], "i4")
    empty = sequence(b"t", number(0))
    head, tail = whole.rsplit(empty, 1)
    return (
        head
        + sequence(b"t", *shape)
        + tail.replace(b"T" + struct.pack("<i", 0), b"T" + struct.pack("<i", len(raw)) + raw)
    )


def long(value: int) -> bytes:
    return b"\x8a" + bytes([(value.bit_length() + 8) // 8]) + value.to_bytes((value.bit_length() + 8) // 8, "little")


def matrix(rows: bytes, columns: bytes) -> bytes:
    return csr([], 0).replace(sequence(b"t", number(0), number(0)), sequence(b"t", rows, columns))


SHARED = b"(" + number(1) * 10_000 + b"l" + put(0)
BOMBS = {
    "memo": b"N" + put(2**31),
    "largest memo": b"N" + put(2**32 - 1),
    "key that is hashed forever": b"}" + nested(100, b"\x86") + b"Ns",
    "nested tuples": nested(100, b"\x86"),
    "nested lists": b"]" * 50_000 + b"a" * 49_999,
    "shared list": b"}(" + number(-1) + SHARED + b"".join(number(k) + b"j\0\0\0\0" for k in range(10_000)) + b"u",
    "shape": shaped((number(2**31 - 1), number(2**31 - 1))),
    "empty shape": shaped((number(2**31 - 1), number(0))),
    "shape beyond 64 bits": shaped((long(2**70),)),
    "shape of text": shaped((text(b"x" * 200), number(2**31 - 1))),
    "negative shape": shaped((number(-1), number(-1)), b"1234"),
    "matrix": matrix(number(2**31 - 1), number(2**31 - 1)),
    "wide matrix": matrix(number(0), number(2**31 - 1)),
    "matrix of text": matrix(text(b"x" * 200), number(2**31 - 1)),
    "long text": b"T" + struct.pack("<i", 2**31 - 1),
    "long integer": b"\x8b" + struct.pack("<i", 2**31 - 1),
    "integer of many digits": b"I" + b"9" * 100_000 + b"\n",
    "frame": b"\x95" + b"\xff" * 8,
    "state of a class": name("numpy", "ndarray") + b"(N}" + text(b"numpy") + b"NsTb",
    "call of a value": b"N)R",
    "extension": b"\x82\x01",
    "persistent": b"Pname\n",
    "pops too much": b"0" * 10,
    "mark that is not there": b"t",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_in_pickles(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(program(BOMBS[bomb]))
    sentence = attempt(lambda: load_plain(path))
    assert bomb == "wide matrix" or sentence is not None
    assert sentence is None or str(path) in sentence


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("graph", program(neighbor_lists({0: [2**31 - 1]}))),
        ("graph", program(b"}(" + text(b"a" * 200) + b"(" + text(b"b" * 200) + b"lu")),
        ("graph", program(b"}(" + number(0) + b"(" + nested(100, b"\x86") + b"lu")),
        ("test.index", b"9" * 30),
        ("test.index", b"9" * 5000),
        ("test.index", b"\xff"),
        ("y", program(array([[1, 0]] * 9, "i4"))),
        ("ty", program(array([[1, 0, 0], [0, 1, 0]], "i4"))),
        ("tx", program(csr([[0, 1], [1]], 3))),
        ("ally", program(array([[np.nan, 0]] * 4, "f4"))),
    ],
)
def test_planetoid_files_that_contradict_each_other(small_planetoid: Path, part: str, content: bytes) -> None:
    (small_planetoid / f"ind.small.{part}").write_bytes(content)
    assert attempt(lambda: read_planetoid(small_planetoid, "small")) is not None


PARTS = ("x", "y", "allx", "ally", "tx", "ty", "graph", "test.index")


def test_folders_in_the_place_of_files(small_planetoid: Path, tmp_path: Path) -> None:
    for part in set(PARTS) - {"x"}:
        path = small_planetoid / f"ind.small.{part}"
        whole = path.read_bytes()
        path.unlink()
        sentence = attempt(lambda: read_planetoid(small_planetoid, "small"))
        assert sentence is not None
        assert f"there is no {path}" in sentence
        path.mkdir()
        sentence = attempt(lambda: read_planetoid(small_planetoid, "small"))
        assert sentence is not None
        assert f"{path} is not a file" in sentence
        path.rmdir()
        path.write_bytes(whole)
    for read in (read_tu, read_gzip_lines):
        sentence = attempt(lambda read=read: read(tmp_path))  # type: ignore[misc]
        assert sentence is not None
        assert "is not a file" in sentence


def test_a_folder_in_the_place_of_a_dataset_is_not_downloaded_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPNN_DATA", raising=False)
    monkeypatch.setenv("MPNN_CACHE", str(tmp_path))
    (tmp_path / "tinyshakespeare" / "input.txt").mkdir(parents=True)
    with pytest.raises(DamagedFile, match=r"input\.txt is not a file; move it away"):
        locate("tinyshakespeare")


@pytest.mark.parametrize("climbing", ["../../etc/passwd", "/etc/passwd", "..", "cora/../cora"])
def test_names_that_climb_are_no_datasets(climbing: str) -> None:
    for read in (tu, multi30k, locate, lambda name: locate("cora", name)):
        with pytest.raises(ValueError, match=r"no (TU )?(dataset|split|file)"):
            read(climbing)


@pytest.mark.parametrize(
    "content",
    [
        "-5\n",
        "0\n",
        "9" * 5000,
        f"{10**18}\n1 1\n0 0\n",
        f"1\n{10**18} 1\n0 0\n",
        f"1\n1 {10**30}\n0 0\n",
        f"1\n1 1\n{10**30} 0\n",
        f"1\n1 1\n0 {10**30}\n",
        f"1\n-{10**18} 1\n",
        "1\n1 1\n0 1 -1\n",
        "1\n1 1\n0 -1\n",
    ],
    ids=lambda content: content[:20],
)
def test_counts_that_no_collection_has(content: str, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text(content)
    sentence = attempt(lambda: read_tu(path))
    assert sentence is not None
    assert "line " in sentence


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "lines.gz"
    path.write_bytes(gzip.compress(b"\n" * 2**25))
    sentence = attempt(lambda: read_gzip_lines(path))
    assert sentence is not None
    assert "unpack to more than 100 times as many" in sentence


def sweep(count: int, seed: int, planetoid: Path, folder: Path) -> None:
    draw, outcomes = random.Random(seed), []
    collection, captions = folder / "two.txt", folder / "lines.gz"
    packed = gzip.compress(b"ein Satz\nnoch ein Satz\n" * 20)
    for _ in range(count):
        part = draw.choice(PARTS)
        path = planetoid / f"ind.small.{part}"
        whole = path.read_bytes()
        path.write_bytes(mutated(whole, draw))
        outcomes.append(attempt(lambda: read_planetoid(planetoid, "small")))
        path.write_bytes(whole)
        collection.write_bytes(mutated(TWO_GRAPHS.encode(), draw))
        outcomes.append(attempt(lambda: read_tu(collection)))
        captions.write_bytes(mutated(packed, draw))
        outcomes.append(attempt(lambda: read_gzip_lines(captions)))
    assert count < 50 or sum(outcome is not None for outcome in outcomes) > count


def test_files_that_were_changed_at_random(small_planetoid: Path, tmp_path: Path) -> None:
    sweep(200, 0, small_planetoid, tmp_path)


@pytest.mark.slow
def test_many_files_that_were_changed_at_random(small_planetoid: Path, tmp_path: Path) -> None:
    for seed in range(1, 4):
        sweep(1500, seed, small_planetoid, tmp_path)


def test_a_matrix_whose_rows_wrap_around(tmp_path: Path) -> None:
    """scipy's own check subtracts the ends of rows in 32 bits, and the difference from -2^31 is positive there."""
    path = tmp_path / "file"
    whole = program(csr([[0], [1], [0, 1], []], 2))
    ends = np.array([0, 1, 2, 4, 4], "<i4").tobytes()
    assert whole.count(ends) == 1
    path.write_bytes(whole.replace(ends, np.array([0, 1, 2, 4, -(2**31)], "<i4").tobytes()))
    sentence = attempt(lambda: load_plain(path))
    assert sentence is not None
    assert "a row of a sparse matrix is out of range" in sentence
