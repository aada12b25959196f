"""The CPU kernels stay within their memory and have no undefined behavior."""

from pathlib import Path

import pytest

from . import sanitized
from .test_fuzz import SEED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sanitized.why_missing() is not None, reason=str(sanitized.why_missing())),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sanitized")


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "tests.fuzz", "--workers", "1", "--cases", "2000", "--seed", str(SEED)),
        (
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/kernels/edges/test_sort_edges.py",
            "tests/kernels/tiles/test_tile_attention.py",
            "tests/kernels/edges/test_sample_neighbors.py",
            "tests/kernels/recurrent/test_scan_kernel.py",
            "tests/kernels/recurrent/test_recurrence.py",
            "tests/backends/test_feature_dropout.py",
        ),
    ],
    ids=["fuzzer", "tests of kernels"],
)
def test_the_sanitizers_report_nothing(folder: Path, arguments: tuple[str, ...]) -> None:
    done = sanitized.run(folder, *arguments)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
