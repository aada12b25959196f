"""`mpnn doctor`: what this installation has, what it lacks, and whether its kernels compute correctly."""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import typer
from torch import Tensor

import mpnn
from mpnn import MessagePassing, graphs
from mpnn.attention import Additive, DeltaRule, DotProduct, GatedLinear, Retention, StateSpace
from mpnn.backends import registered, tuned
from mpnn.cli.console import console
from mpnn.data.locate import search_folders
from mpnn.engine.choice import Refused
from mpnn.graph.registry import install
from mpnn.kernels.cpu import library
from mpnn.kernels.cuda.schedule import unusable

EXTRAS = {
    "transformers": ("hf", "models of Hugging Face (mpnn.hf)"),
    "torch-geometric": ("pyg", "models and datasets of PyTorch Geometric (mpnn.pyg)"),
    "accelerate": ("train", "training (mpnn train, mpnn.train)"),
    "matplotlib": ("viz", "pictures (mpnn.view.plot, Graph.plot)"),
    "numba": ("numba", "aggregators of your own, compiled (combine)"),
}
"""For each package the extra that brings it, and what it is for."""
APART = {
    "triton": "sparse graphs on CUDA; comes with PyTorch's builds for CUDA",
    "torch-scatter": "the backend scatter; compiled against this torch by pip install --no-build-isolation",
}
"""Packages that the command for the others does not install."""
_CLOSE = 1e-4  # relative to the largest number
_WIDTH = 16
_NAMES = 17  # characters of a name
LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "attention": lambda: MessagePassing(graphs.window(3), "sum", None, DotProduct(_WIDTH, 2)),
    "GAT": lambda: MessagePassing(graphs.window(3), "sum", None, Additive(_WIDTH, 8, 2)),
    "sum": lambda: MessagePassing(graphs.window(3)),
    "max": lambda: MessagePassing(graphs.window(3), "max"),
    "retention": lambda: MessagePassing(graphs.causal(), "sum", None, Retention(_WIDTH, 2)),
    "gated linear": lambda: MessagePassing(graphs.causal(), "sum", None, GatedLinear(_WIDTH, 2)),
    "state space": lambda: MessagePassing(graphs.causal(), "sum", None, StateSpace(_WIDTH, 2)),
    "delta rule": lambda: MessagePassing(graphs.causal(), "sum", None, DeltaRule(_WIDTH, 2)),
}
"""The layers that are checked, by what the output calls them."""


def doctor() -> None:
    """Show what this installation has and lacks, and check that its kernels compute correctly.

    Paste the output into a report of a problem. The exit status is 1 if a
    kernel computes wrong numbers.
    """
    console.print("what is installed, then a check of each kernel, which takes up to half a minute:\n", soft_wrap=True)
    for name, value in machine():
        _row(name, value)
    purposes = {name: purpose for name, (_, purpose) in EXTRAS.items()} | APART
    for name, purpose in purposes.items():
        _row(name, installed(name) or f"not installed: {purpose}")
    if missing := [extra for name, (extra, _) in EXTRAS.items() if installed(name) is None]:
        console.print(f"\nto install what is missing: {install(*missing)}", soft_wrap=True, markup=False)
    console.print("\nkernels, compared with the reference:")
    verdicts = []
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for name, verdict in kernels(device):
            _row(f"{device}  {name}", verdict)
            verdicts.append(verdict)
    if any(verdict.startswith("WRONG") for verdict in verdicts):
        raise typer.Exit(1)


def _row(name: str, value: str) -> None:
    """Prints a name and a value at once, so that the screen is never empty while it works."""
    console.print(f"{name:<{_NAMES}}  {value}", soft_wrap=True, markup=False)


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
    """Each backend, and the results of the layers of `LAYERS` that it can run on a device, forward and gradient."""
    torch.manual_seed(0)
    x = torch.randn(40, _WIDTH).to(device)
    layers = {name: build().to(device) for name, build in LAYERS.items()}
    expected = {name: _results(layer, x, "edge_list") for name, layer in layers.items()}
    for backend in registered():
        errors: dict[str, float] = {}
        refusals: dict[str, str] = {}
        for name, layer in layers.items():
            try:
                results = _results(layer, x, backend.NAME)
            except Refused as error:
                refusals[name] = str(error).partition(": ")[2]
                continue
            pairs = zip(results, expected[name], strict=True)
            errors[name] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        if not errors:
            yield backend.NAME, f"not here: {refusals['sum']}"
            continue
        name, worst = max(errors.items(), key=lambda item: item[1])
        verdict = f"correct to {worst:.0e}" if worst < _CLOSE else f"WRONG by {worst:.1e} ({name})"
        yield backend.NAME, f"{verdict}: {', '.join(errors)}"


def _results(layer: MessagePassing, x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    layer.backend = backend
    x = x.clone().requires_grad_()
    out = layer(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), gradient
