"""CPU kernels under an address sanitizer: no size of a layer or of a round reads or writes outside of its tensors."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hatch_build
from mpnn.kernels.cpu import library

SUPPORT = Path(__file__).parents[1] / "support"


def _runtime(name: str) -> str | None:
    """The path of a library of the machine's g++; None if there is none."""
    if shutil.which("g++") is None:
        return None
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return found if os.path.isabs(found) else None


LIBRARIES = [_runtime("libasan.so"), _runtime("libstdc++.so")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or None in LIBRARIES, reason="there is no g++ with an address sanitizer"
    ),
    pytest.mark.skipif(library.processor() is None, reason="there are no kernels for this processor"),
]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels with checks of addresses: compiled by the project's clang, linked by g++, which has the runtime."""
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("sanitized")
    processor, register = hatch_build.PROCESSORS[library.processor() or ""]
    target = hatch_build.TARGETS[f"linux-{'arm64' if processor == 'generic' else 'x86_64'}"]
    options = [option for option in hatch_build.COMPILE if option not in ("-O3", "-fno-sanitize=all")]
    compile = [sys.executable, "-m", "ziglang", "c++", "-target", target.triple, *options, "-O1", "-fsanitize=address"]
    compile += [
        f"-mcpu={processor}",
        f"-DVECTOR_BYTES={register}",
        "-fPIC",
        "-c",
        str(hatch_build.FOLDER / "library.cpp"),
    ]
    subprocess.run([*compile, "-o", "library.o"], check=True, cwd=folder)
    subprocess.run(["g++", "-shared", "-fsanitize=address", "library.o", "-o", "kernels.so"], check=True, cwd=folder)
    return folder / "kernels.so"


def _run(sanitized: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:handle_segv=0"
    environment = os.environ | {"LD_PRELOAD": " ".join(map(str, LIBRARIES)), "ASAN_OPTIONS": options}
    command = [sys.executable, str(SUPPORT / "kernels_under_asan.py"), str(sanitized), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=SUPPORT.parents[1])


def test_kernels_stay_inside_their_tensors(sanitized: Path) -> None:
    ran = _run(sanitized)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "all kernels ran" in ran.stdout


def test_a_planted_error_is_seen(sanitized: Path) -> None:
    ran = _run(sanitized, "planted")
    assert ran.returncode != 0
    assert "AddressSanitizer: heap-" in ran.stderr  # beyond a block, which may lie where another one was freed
