"""Data files that were made to harm, or damaged at random: each ends in a data error with a sentence, or loads, in
bounded memory."""

from __future__ import annotations

import gzip
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import mutated
from tu_files import TWO_GRAPHS

from mpnn.data import DamagedFile, DatasetNotFound, locate, multi30k, tu
from mpnn.data.text import read_gzip_lines
from mpnn.data.tu import read_tu

Read = Callable[[], Any]


def attempt(read: Read) -> str | None:
    """What the data error says; None where the file is read. Other errors, and much memory, fail the test."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentence = None
    try:
        read()
    except (DamagedFile, DatasetNotFound) as error:
        sentence = str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB
    assert sentence is None or (len(sentence) < 1000 and "\n" not in sentence)
    return sentence


@pytest.mark.parametrize("read", [read_tu, read_gzip_lines])
def test_folders_in_the_place_of_files(read: Callable[[Path], Any], tmp_path: Path) -> None:
    assert "is not a file" in str(attempt(lambda: read(tmp_path)))


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


@pytest.mark.parametrize(("seed", "count"), [(0, 200), pytest.param(1, 4500, marks=pytest.mark.slow)])
def test_files_that_were_changed_at_random(seed: int, count: int, tmp_path: Path) -> None:
    draw, outcomes = random.Random(seed), []
    collection, captions = tmp_path / "two.txt", tmp_path / "lines.gz"
    packed = gzip.compress(b"ein Satz\nnoch ein Satz\n" * 20, mtime=0)
    for _ in range(count):
        collection.write_bytes(mutated(TWO_GRAPHS.encode(), draw))
        outcomes.append(attempt(lambda: read_tu(collection)))
        captions.write_bytes(mutated(packed, draw))
        outcomes.append(attempt(lambda: read_gzip_lines(captions)))
    assert sum(outcome is not None for outcome in outcomes) > count / 2
