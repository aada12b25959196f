"""Names and folders in the place of data sets: each ends in a data error with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpnn.data import DamagedFile, locate, multi30k, tu


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
