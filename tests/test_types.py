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
