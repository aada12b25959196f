"""What a user's type checker sees: a program that uses the public names runs, and `mypy --strict` accepts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import user_program

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore")  # of libraries that it converts graphs to
def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    user_program.main()
    assert "csr" in capsys.readouterr().out


@pytest.mark.slow
def test_a_strict_type_checker_accepts_it(tmp_path: Path) -> None:
    options = ["--config-file=", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    command = [sys.executable, "-m", "mypy", *options, str(Path(user_program.__file__))]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


WRONG = """
from mpnn import MessagePassing, anything, graphs, ops
import torch

x = torch.zeros(3, 4)
MessagePassing(graphs.causal(), aggregate="summ")
ops.aggregate(graphs.causal().bind(3), x, "summ")
ops.attend(graphs.causal().bind(3), x, x, x, normalize="softmacks")
ops.attend(graphs.causal().bind(3), x, x, x, scal=1.0)
MessagePassing(graphs.causal(), "sum")(x).foo
"""
"""Each line after the imports and the tensor is an error, and one name is."""


@pytest.mark.slow
def test_a_type_checker_finds_mistakes(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(WRONG)
    options = ["--config-file=", "--follow-imports=silent", f"--cache-dir={tmp_path}", "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *options, str(program)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path)
    lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert lines == {2, 6, 7, 8, 9, 10}, done.stdout
