"""Runs Python over CPU kernels that clang built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.fuzz.sanitized -m tests.fuzz --cases 10000
    ATEN_CPU_CAPABILITY=avx2 python -m tests.fuzz.sanitized -m pytest tests/kernels

Runs in a temporary copy of the package and its tests, from the root of a clone. The first report of a sanitizer ends
the process. Needs clang and its runtimes on x86-64 Linux; on Debian: apt install clang-22 libclang-rt-22-dev.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.files import FOLDER, digest, file_name

ROOT = Path(__file__).parents[2]
MIN_CLANG = 22  # older ones lack vector conversions that the kernels use
RUNTIME = "libclang_rt.asan-x86_64.so"
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fno-omit-frame-pointer", "-fno-exceptions", "-fno-rtti"),
    *("-ffast-math", "-fno-finite-math-only", "-fno-math-errno", "-Wno-psabi"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-shared-libsan"),
)
PROCESSORS = {
    "x86_64_v3": ("-march=x86-64-v3", "-DVECTOR_BYTES=32"),
    "x86_64_v4": ("-march=x86-64-v4", "-DVECTOR_BYTES=64"),
}


@cache
def compiler() -> tuple[str, str] | None:
    """A clang of at least `MIN_CLANG` and the path of its runtime for AddressSanitizer, or None."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(MIN_CLANG, MIN_CLANG + 10))):
        if shutil.which(name) is None:
            continue
        version = re.search(r"version (\d+)", _output(name, "--version"))
        runtime = _output(name, f"-print-file-name={RUNTIME}").strip()
        if version and int(version[1]) >= MIN_CLANG and Path(runtime).is_file():
            return name, runtime
    return None


def why_missing() -> str | None:
    """The reason why the sanitizers cannot run here, or None if they can."""
    if library.processor() not in PROCESSORS or sys.platform != "linux":
        return "the sanitized kernels are for x86-64 and Linux"
    if compiler() is None:
        return f"there is no clang++ of at least {MIN_CLANG} with {RUNTIME}: apt install clang-22 libclang-rt-22-dev"
    return None


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` in this folder, which then holds a copy of the package, its sanitized kernels and the
    tests. The folder can be used again."""
    found = compiler()
    assert found is not None
    name, runtime = found
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "MALLOC_PERTURB_": "128",  # set already, so that the fuzzer does not start itself again
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep what they allocate
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    if not (folder / "mpnn").exists():
        _copy_and_build(folder, name)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _copy_and_build(folder: Path, compiler: str) -> None:
    processor = library.processor() or ""
    for name in ("mpnn", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("kernels-*", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    target = folder / FOLDER.relative_to(ROOT) / file_name(processor, digest())
    source = str(FOLDER / "library.cpp")
    subprocess.run([compiler, *FLAGS, *PROCESSORS[processor], source, "-o", str(target)], check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def main() -> int:
    if (why := why_missing()) is not None:
        print(why)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        done = run(Path(folder), *sys.argv[1:])
    print(done.stdout, done.stderr, sep="\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
