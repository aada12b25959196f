"""Tensors that kernels cannot read: each is computed as edges one by one are, or refused with a sentence."""

import os
import sys
from pathlib import Path

import forked
import pytest
import torch

from mpnn.kernels.cpu import library

PROGRAM = Path(__file__).parents[1] / "support" / "odd_tensors.py"
GROUPS = {
    "traced": ["FakeTensor", "FakeTensor beside real ones", "make_fx", "make_fx, symbolic", "functional"],
    "wrapped": [
        "wrapper",
        "DTensor",
        "subclass",
        "parameter",
        "in grad",
        "in vmap",
        "in jvp",
        "in vmap of grad",
        "dual",
    ],
    "differentiated": ["gradients", "gradients to be differentiated", "batches of gradients", "functionalized"],
    "without memory": ["meta", "sparse", "sparse rows", "mkldnn", "nested", "jagged", "quantized"],
    "of other dtypes": ["complex", "imaginary part", "negated", "bool", "integers", "uint16", "float8", "float64"],
    "of other strides": ["expanded", "overlapping", "spread", "other strides", "misaligned"],
    "of other shapes": ["no rows", "no width", "one dimension", "scalar", "more dimensions"],
    "no tensors": ["array", "list", "None", "number", "text"],
    "in modes": ["inference mode", "device meta", "dispatch mode", "autocast", "default dtype", "plain"],
}


FAST = "traced"  # the others are the same test, of a minute in all


@pytest.mark.parametrize("group", [FAST, *(pytest.param(g, marks=pytest.mark.slow) for g in GROUPS if g != FAST)])
def test_odd_tensors_are_computed_or_refused(group: str, tmp_path: Path) -> None:
    done = forked.run(PROGRAM, *GROUPS[group], folder=tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    lines = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line or line == "end"]
    assert lines, done.stderr
    assert lines[-1] == ["end"], f"ended with {done.returncode} in {lines[-1]}: {done.stderr[-2000:]}"
    assert [line for line in lines if line[0] == "WRONG"] == []
    for line in lines:
        if line[0] == "refused":
            what, kind, text = line[2:4], line[4], line[6] if len(line) > 6 else ""
            # Where kinds end that no check expects: in an attribute or an operator that they do not have. Functions of
            # kernels, which are not public, take tensors for granted.
            if group == "no tensors" and (not line[5] or line[5].startswith("kernels/")):
                continue
            assert kind not in ("AttributeError", "UnboundLocalError", "SystemError", "ZeroDivisionError"), (what, line)
            # Torch's own: for numbers of FakeTensors, and for operators that jagged tensors do not have.
            named = kind in ("DataDependentOutputException", "NotImplementedError")
            assert named or len(text.split()) > 3, f"refused without a sentence: {line}"


def test_freed_and_shared_memory() -> None:
    x = torch.zeros(4)
    assert library.address(x[1:]) == x.data_ptr() + 4
    assert library.address(x[:0]) in (0, x.data_ptr())
    assert library.address(torch.zeros(0)) == 0
    assert library.address(None) is None
    x.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=r"the memory of the Tensor \[4\] was freed"):
        library.address(x)


def test_the_program_notices_a_crash(tmp_path: Path) -> None:
    program = tmp_path / "crash.py"
    program.write_text("import ctypes; print('begin\\tx', flush=True); ctypes.string_at(0)")
    done = forked.run(program, folder=tmp_path, PYTHONPATH="")
    assert done.returncode < 0
    assert done.stdout.splitlines()[-1] != "end"
