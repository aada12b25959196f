"""Names, folders and other files in the place of data sets: each ends in a data error with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpnn.data import SOURCES, DamagedFile, locate, multi30k, tinyshakespeare, tu


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
    ("name", "read"),
    [
        ("MUTAG", lambda: tu("MUTAG")),
        ("PROTEINS", lambda: tu("PROTEINS")),
        ("multi30k", lambda: multi30k("val")),
        ("tinyshakespeare", tinyshakespeare),
    ],
)
def test_a_changed_file_is_refused_before_it_is_read(
    name: str, read: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the right size, so that only the digest tells."""
    monkeypatch.setenv("MPNN_DATA", str(tmp_path))
    for file in SOURCES[name].files:
        path = tmp_path / SOURCES[name].folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"9" * (file.size or 0))
    with pytest.raises(DamagedFile, match=r"has the SHA-256 \w+, expected"):
        read()
