"""Numbers that no function expects: none hangs, crashes or fills memory, and errors name the argument."""

import sys

import odd_numbers
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits a forked process as Linux does")

OF_FLOATS = {"r", "p", "fill", "alpha", "val", "test", "scale", "softcap", "dropout", "end"}
NO_INTEGERS = {"nan", "inf", "1000000000.0", "2.5", "'x'", "[1]", "b'1'", "np.float64(0.5)", "tensor(2.5000)"}
OF_LISTS = {"count_or_indices", "globals", "kernel", "stride", "padding", "dilation", "size", "fanouts"}
SENTENCES = {
    "globals": ("globals", "count", "indices"),
    "height": ("height", "pixels", "shape"),
    "width": ("width", "pixels", "shape"),
    "size": ("size", "blocks of", "multiple of", "pixels", "graph of"),
    "start": ("start", "rows"),
    "stop": ("stop", "rows"),
    "stride": ("stride", "gives"),
    "padding": ("padding", "gives", "dst_width"),
    "dilation": ("dilation", "gives"),
    "kernel": ("kernel", "gives"),
    "num_blocks": ("num_blocks", "graph of", "sources"),
    "node": ("indices", "order", "node"),
    "length": ("length", "memory", "documents"),
    "parent": ("parent",),
    "end": ("edge",),
    "answer": ("answers",),
    "radius": ("radius", "pixels"),
    "n": ("nodes", "num_dst", "num_src"),
    "num_nodes": ("num_nodes", "nodes", "sources"),
    "num_src": ("sources", "num_src", "Graph", "expected 0 to"),
    "num_dst": ("destinations", "num_dst", "nodes", "Graph"),
}
"""Words of which one is in each error, where it is not the name of the argument."""


@pytest.mark.parametrize("name", odd_numbers.CASES)
@pytest.mark.sample(3)
def test_odd_numbers_are_refused_with_the_name_of_the_argument(name: str) -> None:
    lines = odd_numbers.outcomes(name)
    assert [line for line in lines if len(line) < 4] == [], "the process ended in this call"
    assert len(lines) == len(odd_numbers.CASES[name].arguments) * len(odd_numbers.VALUES)
    for argument, value, kind, text in lines:
        call = f"{name}: {argument}={value} gave {kind} {text}"
        if kind == "result":
            listed = argument in OF_LISTS and value == "[1]"
            assert argument in OF_FLOATS or value not in NO_INTEGERS or listed, call
            continue
        assert kind in {f"{error} of mpnn" for error in ("TypeError", "ValueError", "IndexError", "MemoryError")}, call
        words = SENTENCES.get(argument, (argument,))
        assert any(word in text for word in (*words, *argument.split("_"))), call
