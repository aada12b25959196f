"""The compiled library of CPU kernels: it fits the parameters that Python passes, and where it is missing, other
backends serve every request."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import machine
from mpnn import MessagePassing, explain, graphs, ops
from mpnn.attention import DotProduct
from mpnn.kernels import (
    feature_dropout,
    linear,
    row_attention,
    row_reduce,
    sample_neighbors,
    scan,
    selective_scan,
    sort_edges,
    tile_attention,
)
from mpnn.kernels.cpu import files, library

ROOT = Path(__file__).parents[2]
STRUCTS = {
    "row_attention": row_attention.RowAttention,
    "row_sums": row_attention.RowSums,
    "row_reduce": row_reduce.RowReduceStruct,
    "tile_attention": tile_attention._Parameters,
    "feature_dropout": feature_dropout._Parameters,
    "digest": linear._Digest,
    "products": machine.Products,
    "sample_neighbors": sample_neighbors._Parameters,
    "scan": scan._Parameters,
    "selective_scan": selective_scan._Parameters,
    "sort_edges": sort_edges._Parameters,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_parameters_have_the_size_that_the_kernel_expects(name: str) -> None:
    assert ctypes.sizeof(STRUCTS[name]) == library.struct_size(name)


def test_the_digest_depends_on_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("1")
    digests = [files.digest(tmp_path)]
    (tmp_path / "a.cpp").write_text("2")
    digests.append(files.digest(tmp_path))
    (tmp_path / "a.cpp").rename(tmp_path / "b.cpp")
    digests.append(files.digest(tmp_path))
    (tmp_path / "notes.md").write_text("not a source")
    assert len(set(digests)) == 3
    assert files.digest(tmp_path) == digests[-1]


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an edit of the sources: no library has their digest."""
    library.why_missing.cache_clear()
    monkeypatch.setattr(library, "digest", lambda: "0" * 12)
    yield
    monkeypatch.undo()
    library.why_missing.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_without_a_library_other_backends_serve_every_request() -> None:
    layer = MessagePassing(graphs.causal() & graphs.window(3), "sum", None, DotProduct(8, 2, dropout=0.1))
    x = torch.randn(2, 40, 8)
    layer(x).sum().backward()
    plan = explain(layer, x)
    reasons = {candidate.name: candidate.reason or "" for candidate in plan.candidates}
    assert plan.backend in ("dense", "edge_list")
    for name in ("csr", "tiles"):
        assert "000000000000" in reasons[name]
        assert "run `python hatch_build.py`" in reasons[name]
    g = graphs.from_edges(torch.randint(0, 9, (2, 30)), 9)
    for reduce in ("sum", "mean", "max", "std"):
        assert ops.aggregate(g, torch.randn(9, 3), reduce).shape == (9, 3)
    with pytest.raises(ValueError, match=r"its compiled kernels .* are missing"):
        ops.aggregate(g, torch.randn(9, 3), backend="csr")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("default", "None its kernels need AVX2 or arm64"),
        pytest.param("avx2", "x86_64_v3 None", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(library.processor() == "arm64", reason="arm64 has one kind")
def test_torchs_variable_chooses_the_kind_of_processor(capability: str, expected: str) -> None:
    """ATEN_CPU_CAPABILITY=default stands for a processor without AVX2."""
    script = "from mpnn.kernels.cpu import library; print(library.processor(), library.why_missing())"
    environment = {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert done.stdout.startswith(expected)
