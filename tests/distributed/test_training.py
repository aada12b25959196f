"""The examples on several processes: the same losses on any number of them, the same bits after one was killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from real_data import real
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mpnn.data import locate

ROOT = Path(__file__).parents[2]
SMALL = ["--tokens", "512", "--window", "24", "--dim", "32", "--layers", "2"]

pytestmark = pytest.mark.slow


def torchrun(processes, script, *arguments, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it, killed processes do not come back
    }
    return subprocess.Popen(
        [*command, f"--nproc-per-node={processes}", ROOT / "examples" / script, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trained(processes, script, *arguments, folder):
    """The outputs of a script with the variables that torchrun sets, without torchrun, whose imports take seconds."""
    options = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    return forked.run_ranks(processes, ROOT / "examples" / script, *arguments, folder=folder, **options)


def output_of(process):
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return out


def losses(out):
    return [float(loss) for loss in re.findall(r"^(?:step|epoch) \d+: (?:loss )?([\d.]+)", out, re.M)]


def test_a_long_text_trains_alike_on_one_process_and_on_two(tmp_path):
    def run(processes, *options):
        return trained(processes, "long_context.py", *SMALL, *options, folder=tmp_path)[0]

    alone = losses(run(1, "--steps", 5))
    assert len(alone) == 5
    for parameters in ("ddp", "fsdp"):
        assert losses(run(2, "--steps", 5, "--parameters", parameters)) == pytest.approx(alone, abs=5e-6)
    # a checkpoint of two processes continues on three
    options = ("--parameters", "fsdp", "--checkpoint", tmp_path, "--every", 2)
    run(2, *options, "--steps", 2)
    out = run(3, *options, "--steps", 5)
    assert "continues after step 2" in out
    assert losses(out) == pytest.approx(alone[2:], abs=5e-6)


def test_a_model_of_transformers_trains_alike_on_any_number_of_processes(tmp_path):
    options = ("--tokens", 512, "--window", 64, "--dim", 32, "--steps", 20)
    alone = losses(trained(1, "long_context_hf.py", *options, folder=tmp_path)[0])
    assert len(alone) == 20
    assert alone[-1] < alone[0] - 0.3
    for processes, parameters in ((3, "ddp"), (2, "fsdp")):
        more = ("--parameters", parameters)
        found = trained(processes, "long_context_hf.py", *options, *more, folder=tmp_path)
        assert losses(found[0]) == pytest.approx(alone, abs=5e-6)


def test_trainer_of_transformers_has_the_same_losses_on_one_process_and_on_two(tmp_path):
    script = ROOT / "tests" / "support" / "hf_trainer.py"
    alone, divided = (losses(trained(n, script, tmp_path, folder=tmp_path)[0]) for n in (1, 2))
    assert len(alone) == 4
    assert divided == pytest.approx(alone, abs=5e-6)


def test_a_killed_process_comes_back_to_the_same_bits(tmp_path):
    options = (*SMALL, "--steps", 30, "--every", 3, "--checkpoint")
    output_of(torchrun(2, "long_context.py", *options, tmp_path / "whole"))
    process = torchrun(2, "long_context.py", *options, tmp_path / "killed", restarts=3)
    latest = tmp_path / "killed" / "latest"
    wait_for(lambda: latest.exists() and int(latest.read_text()) >= 6)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    out = output_of(process)
    assert "continues after step" in out
    states = [weights(tmp_path / name / "step-30") for name in ("whole", "killed")]
    assert states[0].keys() == states[1].keys()
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name


def test_a_partitioned_graph_trains_alike_on_one_process_and_on_two(tmp_path):
    real(locate, "cora")
    found = [trained(n, "partitioned_graph.py", "--epochs", 21, folder=tmp_path)[0] for n in (1, 2)]
    assert losses(found[1]) == pytest.approx(losses(found[0]), abs=2e-4)
    assert "on 2 processes" in found[1]


def weights(folder):
    """All tensors of a checkpoint, by name."""
    dcp_to_torch_save(folder, folder / "whole.pt")
    found = {}

    def visit(name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{name}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            found[name] = value

    visit("", torch.load(folder / "whole.pt", weights_only=False))
    assert len(found) > 50
    return found


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(ready):
    while not ready():
        time.sleep(0.02)


@pytest.mark.slow
def test_ray_starts_the_processes(tmp_path):
    pytest.importorskip("ray", reason="ray[train] is not installed")
    losses_of = []
    for workers in (1, 2):
        command = [
            sys.executable,
            ROOT / "examples" / "ray_train.py",
            "--workers",
            workers,
            "--tokens",
            256,
            "--steps",
            2,
        ]
        environment = os.environ | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        losses_of.append(float(done.stdout.rsplit(": ", 1)[1].split()[0]))
    assert losses_of[0] == pytest.approx(losses_of[1], abs=5e-6)
