"""`mpnn doctor`: facts for a report of a problem, and a check of the kernels."""

import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from mpnn import MessagePassing
from mpnn.aggregate import Max
from mpnn.cli import doctor
from mpnn.cli.app import app


def test_it_names_versions_kernels_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor,
        "EXTRAS",
        {"torch": ("cli", "everything"), "no-such-package": ("hf", "nothing"), "nor-this": ("pyg", "ado")},
    )
    monkeypatch.setattr(doctor, "APART", {"comes-otherwise": "something"})
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert torch.__version__ in said
    assert "no-such-package not installed: nothing" in said
    assert "comes-otherwise not installed: something" in said
    command = 'pip install -c constraints.txt ".[hf,pyg]" in the folder of mpnn\'s source kernels'
    assert f"to install what is missing: {command}" in said, "one command"
    for name, layers in {
        "edge_list": ", ".join(doctor.LAYERS),
        "dense": "attention",
        "tiles": "attention",
        "csr": "attention, GAT, sum, max",
        "scan": "retention, gated linear, state space, delta rule",
    }.items():
        assert re.search(rf"cpu {name} correct to [\de.+-]+: {layers}", said), name


def test_a_kernel_that_computes_wrong_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor._results

    def wrong(layer: MessagePassing, x: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        out, gradient = right(layer, x, backend)
        return out + (backend == "csr" and isinstance(layer.aggregate, Max)), gradient

    monkeypatch.setattr(doctor, "_results", wrong)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert re.search(r"csr WRONG by [\d.e+-]+ \(max\): ", " ".join(done.output.split()))


def test_it_says_what_a_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    for version, path, said in (
        ("3.6.0", os.environ["PATH"], ""),
        ("3.5.1", os.environ["PATH"], "; no sparse kernels there: its kernels need triton 3.6"),
        ("3.6.0", "", "; no sparse kernels there: Triton needs a C compiler"),
    ):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
        monkeypatch.setenv("PATH", path)
        assert doctor.gpu().startswith(f"H100, CUDA {torch.version.cuda}{said}")
        assert doctor.gpu().count(";") == said.count(";")


def test_each_row_is_printed_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(device: str) -> Iterator[tuple[str, str]]:
        yield "first", "correct"
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "kernels", stuck)
    said = CliRunner().invoke(app, ["doctor"]).output
    assert said.startswith("what is installed, then a check of each kernel")
    assert torch.__version__ in said
    assert "cpu  first         correct\n" in said
