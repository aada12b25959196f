"""The table of docs/performance.md has a row for each case, and its bars hold where tests run."""

import pytest
import torch
from operator_table import AGGREGATES, ATTENTIONS, KINDS, PAGE, made_graphs, measured


def test_the_page_has_all_rows_within_its_bars() -> None:
    lines = PAGE.read_text().split("<!-- aggregators -->\n")[1].split("<!-- end -->")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    expected = [[a, t, g] for g in made_graphs() for t in ATTENTIONS for a in AGGREGATES]
    assert [row[:3] for row in rows] == expected
    for *names, forward, gradient, second in rows:
        assert min(map(float, (forward, gradient, second))) >= 1.0, names
        if names[0] in ("max", "std") and names[1] != "none":
            assert float(gradient) >= (4.0 if names[2] == "window(8)" else 1.7), names


@pytest.mark.slow
def test_the_bars_hold_here() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for row in measured(("max", "std"), repeats=3):  # the first also plans and binds
            assert min(row.ratios[kind] for kind in KINDS) > 0.6, row  # 1.0 on a quiet machine
    finally:
        torch.set_num_threads(threads)
