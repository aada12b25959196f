"""Draws graphs and links, writes them as files of every dialect, and most often with a fault, and reads them back.

A file must be read as what was drawn, or refused with an error message; anything else is a silent misreading. Options
are drawn, too: gaps and how they are filled, scaling, categories, dates, repeated edges, encodings, relations, times,
sets of nodes. As a program, it draws more than the tests do:
`PYTHONPATH=.:tests/support python tests/support/table_fuzzer.py 20000`.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz_graphs import GraphDraw
from fuzz_links import LinkDraw
from fuzz_nodes import NodeDraw

KINDS = (GraphDraw, NodeDraw, NodeDraw, LinkDraw)


def misread(seeds: range, say: Any = None) -> list[str]:
    """The draws that are read otherwise than they were drawn, or refused without a reason."""
    wrong = []
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        kind = KINDS[seed % len(KINDS)]
        with tempfile.TemporaryDirectory() as folder:
            outcome, found = kind(seed).run(Path(folder))
        outcomes[f"{kind.__name__} {outcome.partition(':')[0]}"] += 1
        if found:
            wrong.append(found)
            if say:
                say(found)
    if say:
        say(f"{dict(outcomes)}, {len(wrong)} misread or refused without a fault")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(misread(range(*map(int, sys.argv[1:])), print)))
