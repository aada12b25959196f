"""Files written atomically: whole or absent, whoever is killed, whoever writes at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpnn.graph import files
from mpnn.graph.files import atomic_path, cache_dir, remove_abandoned, write_atomically

# The file alone, without the package: torch takes seconds to import.
LOAD = f"from runpy import run_path; write_atomically = run_path({files.__file__!r})['write_atomically']\n"
WRITER = """
import sys, time

def write(temporary):
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)

write_atomically(sys.argv[1], write)
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    """A process that is in the middle of writing `path`."""
    process = subprocess.Popen([sys.executable, "-c", LOAD + WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.txt", lambda temporary: temporary.write_text("new"))
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locks that end with a process")
def test_the_next_write_deletes_what_killed_writers_left_but_not_what_others_write(tmp_path: Path) -> None:
    path, other = tmp_path / "a[1].txt", tmp_path / "b.txt"
    kill(start_writer(path))
    kill(start_writer(other))
    alive = start_writer(path)
    try:
        assert (
            len(list(tmp_path.iterdir())) == 2
        )  # `other`'s, which only a writer of `other` deletes, and the living one
        write_atomically(path, lambda temporary: temporary.write_text("whole"))
        assert len(list(tmp_path.iterdir())) == 3
    finally:
        kill(alive)
    remove_abandoned(path)
    remove_abandoned(other)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "whole"


MANY = """
import sys
for k in range(50):
    write_atomically(sys.argv[1], lambda temporary: temporary.write_text(sys.argv[2] * 10_000))
"""


def test_processes_that_write_the_same_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    writers = [subprocess.Popen([sys.executable, "-c", LOAD + MANY, str(path), letter]) for letter in "abc"]
    while any(writer.poll() is None for writer in writers):
        assert not path.exists() or len(set(path.read_text())) == 1
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]
    assert len(path.read_text()) == 10_000


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"MPNN_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/mpnn"),
        ("linux", {}, "/home/me/.cache/mpnn"),
        ("darwin", {}, "/home/me/Library/Caches/mpnn"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/mpnn/Cache"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch, platform, environment, expected):
    for name in ("MPNN_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert cache_dir().as_posix() == expected
