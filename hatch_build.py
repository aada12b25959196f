"""Compiles the CPU kernels of mpnn/kernels/cpu when the package is built or installed.

The compiler is the clang of the PyPI package `ziglang`, so nothing has to be installed on the machine, and it compiles
for other machines as well. In a working copy (after `pip install ziglang hatchling`)

    python hatch_build.py                   # compiles the kernels for this machine, after a change of their sources
    python hatch_build.py --all [FOLDER]    # writes the source distribution and a wheel for each of TARGETS to dist/

and `MPNN_TARGET=macos-arm64 pip wheel --no-deps .` writes the wheel for another machine.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
FOLDER = ROOT / "mpnn" / "kernels" / "cpu"
COMPILE = (
    *("-std=c++17", "-O3", "-ffast-math", "-fno-finite-math-only", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"),
    *("-fno-sanitize=all", "-fvisibility=default", "-Wall", "-Werror", "-Wno-psabi", "-g0"),
)
LINK = ("-shared", "-nostdlib++", "-s")
# processor -> (processor for the compiler, bytes of a vector). On arm64 a vector is two registers of 16 bytes, so that
# a product keeps 24 of its 32 registers as sums; docs/contributing.md has the counts of instructions.
PROCESSORS = {"x86_64_v3": ("x86_64_v3", 32), "x86_64_v4": ("x86_64_v4", 64), "arm64": ("generic", 32)}


class Target(NamedTuple):
    """What a wheel is for: `system` as `sys.platform`, the compiler's target, the wheel's platform, which is the oldest
    system that the kernels run on, and the kinds of processors."""

    system: str
    triple: str
    platform: str
    processors: tuple[str, ...]


_X86_64, _ARM64 = ("x86_64_v3", "x86_64_v4"), ("arm64",)
TARGETS = {
    "linux-x86_64": Target("linux", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", _X86_64),
    "linux-arm64": Target("linux", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", _ARM64),
    "macos-arm64": Target("darwin", "aarch64-macos.11.0", "macosx_11_0_arm64", _ARM64),
    "macos-x86_64": Target("darwin", "x86_64-macos.11.0", "macosx_11_0_x86_64", _X86_64),
    "windows-x86_64": Target("win32", "x86_64-windows-gnu", "win_amd64", _X86_64),
}


# A library of macOS holds its own name, which is otherwise the path that it was linked at.
_LINK = {"linux": (), "darwin": ("-Wl,-install_name,@rpath/mpnn",), "win32": ()}


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling calls `initialize` before it builds a wheel, an editable one included."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        target = chosen_target()
        if target is None:
            self.app.display_warning("no CPU kernels for this machine: `tiles` and `csr` will be unavailable")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{target.platform}"
        build_data["artifacts"] += [f"mpnn/kernels/cpu/{path.name}" for path in build(target)]


def chosen_target() -> Target | None:
    """The target that the environment variable MPNN_TARGET names, or this machine; None if it has no kernels."""
    name = os.environ.get("MPNN_TARGET")
    if name is not None and name not in TARGETS:
        raise ValueError(f"MPNN_TARGET is {name!r}; it must be one of {', '.join(TARGETS)}")
    return TARGETS.get(name or _this_machine())


def _this_machine() -> str:
    system = {"linux": "linux", "darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    machine = platform.machine().lower()
    return f"{system}-{ {'amd64': 'x86_64', 'aarch64': 'arm64'}.get(machine, machine) }"


def build(target: Target) -> list[Path]:
    """Compiles the kernels for the processors of a target, unless they are up to date. Returns the files."""
    module = _files()
    digest = module.digest()
    for old in FOLDER.glob("kernels-*"):
        if digest not in old.name:
            old.unlink()
    files = {name: FOLDER / module.file_name(name, digest, target.system) for name in target.processors}
    missing = [(name, path) for name, path in files.items() if not path.exists()]
    with ThreadPoolExecutor(max(len(missing), 1)) as pool:
        list(pool.map(lambda item: _compile(target, *item), missing))
    return list(files.values())


def _compile(target: Target, name: str, path: Path) -> None:
    """Writes the library in a folder of its own first, so that an interrupted build leaves no damaged file; the linker
    for Windows writes others beside it. It links for any processor: ziglang then compiles Windows' own parts once."""
    processor, register = PROCESSORS[name]
    clang = (sys.executable, "-m", "ziglang", "c++", "-target", target.triple)
    options = (f"-mcpu={processor}", f"-DVECTOR_BYTES={register}", *(("-fPIC",) if target.system != "win32" else ()))
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        commands = (
            (*clang, *COMPILE, *options, "-c", str(FOLDER / "library.cpp"), "-o", "library.o"),
            (*clang, *LINK, *_LINK[target.system], "library.o", "-o", path.name),
        )
        for command in commands:
            subprocess.run(command, check=True, cwd=folder)
        os.replace(Path(folder, path.name), path)


def build_all(folder: Path) -> Iterator[Path]:
    """Writes the source distribution and a wheel for each of TARGETS."""
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    yield from map(Path, SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    for name in TARGETS:
        os.environ["MPNN_TARGET"] = name
        yield from map(Path, WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))


def _files() -> ModuleType:
    """mpnn/kernels/cpu/files.py, without importing mpnn, which needs torch."""
    spec = importlib.util.spec_from_file_location("files", FOLDER / "files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    target, (option, *folder) = chosen_target(), sys.argv[1:] or [""]
    if option == "--all" and len(folder) < 2:
        written = build_all(Path(*folder or ("dist",)))
    elif option:
        sys.exit(f"unknown arguments {sys.argv[1:]}: `python hatch_build.py` or `python hatch_build.py --all [FOLDER]`")
    elif target is None:
        sys.exit(f"there are no CPU kernels for {_this_machine()}: they are for {', '.join(TARGETS)}")
    else:
        written = iter(build(target))
    for path in written:
        print(os.path.relpath(path, ROOT), flush=True)


if __name__ == "__main__":
    main()
