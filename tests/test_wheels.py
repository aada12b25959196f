"""Wheels for five platforms, built on one machine."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import binaries
import pytest
from packaging.metadata import Metadata
from packaging.tags import parse_tag
from packaging.utils import parse_sdist_filename, parse_wheel_filename

from mpnn.kernels.cpu.files import FOLDER, digest, file_name

pytest.importorskip("hatchling", reason="hatchling builds wheels: pip install hatchling ziglang")
import hatch_build

ROOT = Path(__file__).parents[1]
OLDEST = {"linux": (2, 17), "darwin": (11, 0), "win32": None}  # of glibc and macOS
# What every system of a platform has. Of Windows: since Windows 10.
NEEDS = {
    "linux": r"libc\.so\.6|libm\.so\.6|ld-linux-.*",
    "darwin": r"/usr/lib/libSystem\.B\.dylib",
    "win32": r"kernel32\.dll|ntdll\.dll|api-ms-win-crt-.*\.dll",
}


@pytest.mark.parametrize(
    ("system", "machine", "name"),
    [
        ("linux", "x86_64", "linux-x86_64"),
        ("linux", "aarch64", "linux-arm64"),
        ("darwin", "arm64", "macos-arm64"),
        ("darwin", "x86_64", "macos-x86_64"),
        ("win32", "AMD64", "windows-x86_64"),
        ("linux", "riscv64", None),
    ],
)
def test_a_machine_builds_for_itself(monkeypatch, system, machine, name):
    monkeypatch.delenv("MPNN_TARGET", raising=False)
    monkeypatch.setattr(hatch_build.sys, "platform", system)
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: machine)
    assert hatch_build.chosen_target() == hatch_build.TARGETS.get(name)
    monkeypatch.setenv("MPNN_TARGET", "windows-x86_64")
    assert hatch_build.chosen_target().platform == "win_amd64"
    monkeypatch.setenv("MPNN_TARGET", "windows")
    with pytest.raises(ValueError, match="MPNN_TARGET is 'windows'; it must be one of linux-x86_64, "):
        hatch_build.chosen_target()


def test_a_library_is_named_after_its_system():
    assert [file_name("x", "0", system) for system in OLDEST] == [
        "kernels-x-0.so",
        "kernels-x-0.dylib",
        "kernels-x-0.dll",
    ]


def sources() -> set[str]:
    """The files of the package: those that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "mpnn"]
    return {name for name in subprocess.check_output(command, cwd=ROOT, text=True).split() if (ROOT / name).exists()}


def kernels() -> set[str]:
    """The names of the kernels, as the library that this machine loads exports them."""
    native = next(FOLDER.glob(f"kernels-*-{digest()}.so"))
    return {name for name in binaries.read(native).exports if not name.startswith("_")}


@pytest.mark.slow
def test_wheels_of_five_platforms(tmp_path):
    """One test, so that one process compiles."""
    pytest.importorskip("ziglang", reason="ziglang compiles the kernels: pip install ziglang")
    built = tmp_path / "dist"
    environment = {name: value for name, value in os.environ.items() if name != "MPNN_TARGET"}
    subprocess.run([sys.executable, "hatch_build.py", "--all", str(built)], cwd=ROOT, check=True, env=environment)
    for name in hatch_build.TARGETS:
        check_wheel(built, name, tmp_path / name)
    check_metadata(built)


def check_wheel(built: Path, name: str, tmp_path: Path) -> None:
    """The wheel holds the package and the kernels of its platform."""
    target = hatch_build.TARGETS[name]
    path = built / f"mpnn-{version()}-py3-none-{target.platform}.whl"
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path)
        names = {file for file in wheel.namelist() if ".dist-info/" not in file}
    libraries = {f"mpnn/kernels/cpu/{file_name(kind, digest(), target.system)}" for kind in target.processors}
    packed = {file for file in sources() if not file.startswith("mpnn/view/viewer/")}  # what viewer.js is built from
    assert names == packed | libraries
    info = next(tmp_path.glob("*.dist-info"))
    fields = HeaderParser().parsestr((info / "WHEEL").read_text())
    assert fields["Root-Is-Purelib"] == "false"
    assert parse_tag(fields["Tag"]) == parse_wheel_filename(path.name)[3]
    for library in libraries:
        binary = binaries.read(tmp_path / library)
        assert (binary.system, binary.machine) == (target.system, name.split("-")[1])
        assert kernels() <= binary.exports
        assert all(re.fullmatch(NEEDS[target.system], needed) for needed in binary.needs), binary.needs
        assert (binary.oldest or (0,)) <= (OLDEST[target.system] or (0,))
        assert binary.signed or (target.system, binary.machine) != ("darwin", "arm64")
        assert 100_000 < (tmp_path / library).stat().st_size < 2_000_000
    assert path.stat().st_size < 3_000_000


def version() -> str:
    return re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def check_metadata(built: Path) -> None:
    """An index would take them: their metadata are valid, and name the README as Markdown."""
    source = next(built.glob("*.tar.gz"))
    assert str(parse_sdist_filename(source.name)[1]) == version()
    with tarfile.open(source) as archive:
        prefix = source.name.removesuffix(".tar.gz") + "/"
        names = {name.removeprefix(prefix) for name in archive.getnames()}
        texts = [archive.extractfile(prefix + "PKG-INFO").read()]
    assert sources() | {"hatch_build.py", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if "kernels-" in name]
    for path in built.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            texts.append(wheel.read(f"mpnn-{version()}.dist-info/METADATA"))
    assert len(set(texts)) == 1
    assert len(texts) == 1 + len(hatch_build.TARGETS)
    metadata = Metadata.from_email(texts[0], validate=True)
    assert metadata.description == (ROOT / "README.md").read_text()
    assert metadata.description_content_type == "text/markdown"
