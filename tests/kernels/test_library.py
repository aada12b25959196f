"""The compiled library of CPU kernels: it fits the parameters that Python passes, and where it is missing, other
backends serve every request."""

import ctypes
import ctypes.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import machine
from mpnn import MessagePassing, explain, graphs, ops
from mpnn.attention import DotProduct
from mpnn.kernels.cpu import files, library, threads
from mpnn.kernels.dense import feature_dropout
from mpnn.kernels.edges import sample as sample_neighbors, sort as sort_edges
from mpnn.kernels.layers import encoder_layer
from mpnn.kernels.recurrent import scan, selective as selective_scan
from mpnn.kernels.rows import attention as row_attention, reduce as row_reduce, scatter
from mpnn.kernels.tiles import attention as tile_attention

ROOT = Path(__file__).parents[2]
STRUCTS = {
    "row_attention": row_attention.RowAttention,
    "row_sums": row_attention.RowSums,
    "row_reduce": row_reduce.RowReduceStruct,
    "edge_sum": row_reduce.EdgeSumStruct,
    "row_extreme": scatter.RowExtremeStruct,
    "match": scatter.MatchStruct,
    "tile_attention": tile_attention._Parameters,
    "encoder_layer": encoder_layer._Parameters,
    "feature_dropout": feature_dropout._Parameters,
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
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    library.why_missing.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.why_missing.cache_clear()


@pytest.mark.parametrize(
    ("machine", "capability", "kind"),
    [
        ("arm64", "DEFAULT", "arm64"),
        ("aarch64", "DEFAULT", "arm64"),
        ("AMD64", "AVX2", "x86_64_v3"),
        ("x86_64", "AVX512", "x86_64_v4"),
        ("x86_64", "DEFAULT", None),
        ("riscv64", "DEFAULT", None),
    ],
)
def test_each_machine_has_its_library(
    machine: str, capability: str, kind: str | None, asked_anew: pytest.MonkeyPatch
) -> None:
    asked_anew.setattr(library.platform, "machine", lambda: machine)
    asked_anew.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert library.processor() == kind
    if kind is None:
        assert f"this processor ({machine}) has neither" in (library.why_missing() or "")


def test_a_library_that_does_not_load_says_why(asked_anew: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise OSError("wrong ELF class")

    asked_anew.setattr(library, "_load", load)
    assert library.why_missing() == "its compiled kernels cannot be loaded: wrong ELF class"


@pytest.mark.parametrize("parts", [1, 3])
def test_a_kernel_without_memory_raises(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    kernel = function(lambda *place: place[2] == 1)  # only the second part has memory
    monkeypatch.setattr(library, "_kernel", lambda name, dtype: kernel)
    with pytest.raises(MemoryError, match="no memory for the intermediate results of rows"):
        library.run("rows", torch.float32, scan._Parameters(), parts=parts)


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
@pytest.mark.slow
def test_torchs_variable_chooses_the_kind_of_processor(capability: str, expected: str) -> None:
    """ATEN_CPU_CAPABILITY=default stands for a processor without AVX2."""
    script = "from mpnn.kernels.cpu import library; print(library.processor(), library.why_missing())"
    environment = {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert done.stdout.startswith(expected)


def test_llvms_openmp_runs_the_parts() -> None:
    """The team of macOS and Windows, here with a runtime in Python whose team has three threads: LLVM's passes the data
    after two numbers of the thread, and its team may be larger or smaller than the count."""
    location, numbers = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
    function = ctypes.CFUNCTYPE(None, numbers, numbers, ctypes.c_void_p)
    teams: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(None, location, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    def fork(where: int, arguments: int, run: int, data: int) -> None:
        teams.append((ctypes.c_int32.from_address(where + 4).value, arguments))
        for k in range(3):
            number = ctypes.c_int32(k)
            function(run)(number, number, data)

    parts: list[tuple[int, int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    def kernel(parameters: int, entry: int, part: int, count: int) -> bool:
        parts.append((entry, part, count))
        return (entry, part) != (4, 1)

    def run(team: object, entries: int) -> bool:
        return library._run_parts()(kernel, None, 3, entries, 2, team, True, 8)

    assert not run(fork, 2)  # one part had no memory
    assert parts == [(3, 0, 2), (3, 1, 2), (4, 0, 2), (4, 1, 2)]
    assert teams == [(2, 1)]
    assert run(None, 1)
    assert len(teams) == 1


OPENMP = ctypes.util.find_library("omp")


@pytest.mark.skipif(OPENMP is None, reason="LLVM's OpenMP is not installed: Debian's package libomp5")
def test_threads_of_llvms_openmp_share_the_parts() -> None:
    """A runtime of its own beside torch's: the parts run at the same time, on its threads."""
    fork = ctypes.CDLL(OPENMP).__kmpc_fork_call
    both = threading.Barrier(2, timeout=60)
    names: set[int] = set()

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    def kernel(parameters: int, entry: int, part: int, count: int) -> bool:
        both.wait()
        names.add(threading.get_native_id())
        return True

    ctypes.CDLL(OPENMP).omp_set_num_threads(2)
    assert library._run_parts()(kernel, None, 0, 2, 1, fork, True, 2)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("system", "file", "function", "forks"),
    [
        ("linux", "libtorch_cpu.so", "GOMP_parallel", False),
        ("darwin", "libtorch_cpu.dylib", "__kmpc_fork_call", True),
        ("win32", "libiomp5md.dll", "__kmpc_fork_call", True),
    ],
)
def test_kernels_run_on_the_threads_of_torchs_own_runtime(
    system: str, file: str, function: str, forks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    symbol = ctypes.c_int64()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: {str(tmp_path / file): {function: symbol}}[path])
    monkeypatch.setattr(ctypes, "cast", lambda value, kind: ctypes.c_void_p(ctypes.addressof(value)))
    assert threads._team.__wrapped__(system, tmp_path) == (ctypes.addressof(symbol), forks)


def test_without_a_known_runtime_python_threads_share_the_parts(tmp_path: Path) -> None:
    assert threads._team.__wrapped__("linux", tmp_path) is None
    assert threads._team.__wrapped__("freebsd", tmp_path) is None
