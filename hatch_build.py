"""Compiles the CPU kernels of mpnn/kernels/cpu when the package is built or installed.

The compiler is the clang of the PyPI package `ziglang`, so nothing has to be installed on the machine. In a working
copy `python hatch_build.py` compiles them after a change of their sources (it needs `pip install ziglang`).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
FOLDER = ROOT / "mpnn" / "kernels" / "cpu"
FLAGS = (
    *("-std=c++17", "-O3", "-ffast-math", "-fno-finite-math-only", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"),
    *(
        "-nostdlib++",
        "-fno-sanitize=all",
        "-fvisibility=default",
        "-Wall",
        "-Werror",
        "-Wno-psabi",
        "-shared",
        "-g0",
        "-s",
    ),
)
# processor -> (architecture and processor for the compiler, bytes of a vector register)
PROCESSORS = {
    "x86_64_v3": ("x86_64", "x86_64_v3", 32),
    "x86_64_v4": ("x86_64", "x86_64_v4", 64),
    "arm64": ("aarch64", "generic", 32),
}
SYSTEMS = {"linux": "linux-gnu.2.17", "darwin": "macos.11.0", "win32": "windows-gnu"}


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling calls `initialize` before it builds a wheel, an editable one included."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        built = build()
        if not built:
            self.app.display_warning("no CPU kernels for this machine: `tiles` and `csr` will be unavailable")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["artifacts"] += [f"mpnn/kernels/cpu/{path.name}" for path in built]


def build() -> list[Path]:
    """Compiles the kernels for the processors of this architecture, unless they are up to date. Returns the files."""
    names = _processors()
    module = _files()
    files = {name: FOLDER / module.file_name(name, module.digest()) for name in names}
    for old in set(FOLDER.glob("kernels-*")) - set(files.values()):
        old.unlink()
    missing = [(name, path) for name, path in files.items() if not path.exists()]
    with ThreadPoolExecutor(max(len(missing), 1)) as pool:
        list(pool.map(lambda item: _compile(*item), missing))
    return list(files.values())


def _processors() -> list[str]:
    machine = platform.machine().lower()
    if sys.platform not in SYSTEMS:
        return []
    return {"x86_64": ["x86_64_v3", "x86_64_v4"], "amd64": ["x86_64_v3", "x86_64_v4"]}.get(
        machine, ["arm64"] if machine in ("arm64", "aarch64") else []
    )


def _compile(name: str, path: Path) -> None:
    """Writes the library under a temporary name first, so that an interrupted build leaves no damaged file."""
    architecture, processor, register = PROCESSORS[name]
    target = ("-target", f"{architecture}-{SYSTEMS[sys.platform]}", f"-mcpu={processor}", f"-DVECTOR_BYTES={register}")
    pic = () if sys.platform == "win32" else ("-fPIC",)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, *target, *pic, str(FOLDER / "library.cpp")]
    subprocess.run([*command, "-o", str(temporary)], check=True)
    os.replace(temporary, path)


def platform_tag() -> str:
    """The wheel's platform: the oldest system that the kernels run on."""
    machine = platform.machine().lower()
    if sys.platform == "linux":
        return f"manylinux_2_17_{machine}"
    if sys.platform == "darwin":
        return f"macosx_11_0_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _files() -> ModuleType:
    """mpnn/kernels/cpu/files.py, without importing mpnn, which needs torch."""
    spec = importlib.util.spec_from_file_location("files", FOLDER / "files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    for file in build():
        print(file.relative_to(ROOT))
