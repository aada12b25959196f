"""`mpnn doctor`: what this installation has, what it lacks, and whether its kernels compute correctly."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import typer
from rich.table import Table

import mpnn
from mpnn import graphs, ops
from mpnn.backends import registered, tuned
from mpnn.cli.console import console
from mpnn.data.locate import search_folders
from mpnn.engine.choice import refusal as why_not
from mpnn.kernels.cpu import library
from mpnn.kernels.cuda.schedule import unusable
from mpnn.round import Round
from mpnn.scores import Dot

# package: what it is for
EXTRAS = {
    "transformers": "models of Hugging Face (mpnn.hf)",
    "torch-geometric": "models and datasets of PyTorch Geometric (mpnn.pyg)",
    "accelerate": "training (mpnn train, mpnn.train)",
    "matplotlib": "pictures (mpnn.view.plot, Graph.plot)",
    "numba": "aggregators of your own, compiled (combine)",
}
APART = {
    "triton": "sparse graphs on CUDA; comes with PyTorch's builds for CUDA",
    "torch-scatter": "the backend scatter; compiled against this torch by pip install --no-build-isolation",
}
"""Packages that the command for the others does not install."""
_CLOSE = 1e-4  # relative to the largest number


def doctor() -> None:
    """Show what this installation has and lacks, and check that its kernels compute correctly.

    Paste the output into a report of a problem. The exit status is 1 if a
    kernel computes wrong numbers.
    """
    table = Table.grid(padding=(0, 2))
    for name, value in machine():
        table.add_row(name, value)
    for name, purpose in (EXTRAS | APART).items():
        table.add_row(name, installed(name) or f"not installed: {purpose}")
    console.print(table)
    if missing := [name for name in EXTRAS if installed(name) is None]:
        console.print(f"\nto install what is missing: pip install {' '.join(missing)}", soft_wrap=True)
    console.print("\nkernels, compared with the reference:")
    wrong = False
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for name, verdict in kernels(device):
            wrong |= verdict.startswith("WRONG")
            console.print(f"  {device:<4} {name:<10} {verdict}", soft_wrap=True, markup=False)
    if wrong:
        raise typer.Exit(1)


def machine() -> Iterator[tuple[str, str]]:
    """Names and values: versions, processor, threads, devices and folders."""
    yield "mpnn", f"{mpnn.__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads on {os.cpu_count()} cores"
    yield "processor", f"{tuned.processor()}, {torch.backends.cpu.get_cpu_capability()}"
    yield "CPU kernels", library.why_missing() or f"compiled for {library.processor()}"
    yield "GPU", gpu()
    try:
        file = tuned.path(torch.get_num_threads())
        yield "prices", f"of this machine: {file}" if file.exists() else "as shipped; mpnn tune measures this machine"
        yield "data", ", ".join(map(str, search_folders()))
    except FileNotFoundError as error:
        yield "folder for caches", f"none: {error}"


def gpu() -> str:
    """The GPU, and what its kernels lack."""
    if not torch.cuda.is_available():
        return "none that torch can use"
    name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    lacking = unusable()
    if lacking is None and not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        lacking = "Triton needs a C compiler: install gcc, or set CC"
    return name if lacking is None else f"{name}; no sparse kernels there: {lacking}"


def installed(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kernels(device: str) -> Iterator[tuple[str, str]]:
    """Each backend, and the result of a small check on a device: window attention, forward and gradient."""
    torch.manual_seed(0)
    x = torch.randn(40, 2, 8).to(device)
    graph = graphs.window(3).bind(40).to(device)
    expected = _attend(graph, x, "edge_list")
    round = Round(graph, x, Dot(x, x, 1.0))
    for backend in registered():
        if (reason := why_not(backend, round)) is not None:
            yield backend.NAME, f"not here: {reason}"
            continue
        pairs = zip(_attend(graph, x, backend.NAME), expected, strict=True)
        error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        yield backend.NAME, f"correct to {error:.0e}" if error < _CLOSE else f"WRONG by {error:.1e}"


def _attend(graph: mpnn.Graph, x: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = ops.attend(graph, x, x, x, backend=backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), gradient
