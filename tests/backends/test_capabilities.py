"""docs/backends.md lists what backends answer today, and its rows are independent of one another."""

import pytest
from capabilities import GRAPHS, PAGE, REQUESTS, refusal, supported, updated

from mpnn.backends import BACKENDS, csr, edge_list


def test_the_page_lists_what_backends_answer() -> None:
    text = PAGE.read_text()
    assert updated(text) == text, "a backend's answer changed: run python tests/support/capabilities.py, read the diff"


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 5))])
def test_a_request_over_a_graph_is_supported_if_both_are(part: int) -> None:
    """A fifth of all pairs, in which each request and each graph occurs."""
    for i, (asked, make) in enumerate(REQUESTS.items()):
        for j, (name, graph) in enumerate(GRAPHS.items()):
            if (i + j) % 5 != part:
                continue
            request = make(graph)
            for backend in BACKENDS:
                reason = refusal(backend, request)
                expected = supported(backend, asked, name)
                assert (reason is None) == expected, f"{backend.NAME}: {asked} over {name}: {reason}"


def test_the_specification_supports_every_row() -> None:
    assert all(supported(edge_list, row) for row in (*REQUESTS, *GRAPHS))


def test_a_backend_that_begins_to_refuse_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "softcap is out of order today"
    monkeypatch.setattr(csr.ATTENTION["cpu"], "SERVES", csr.ATTENTION["cpu"].SERVES - {"softcap"})
    monkeypatch.setattr(csr.ATTENTION["cpu"], "REASONS", {"softcap": reason})
    assert reason in updated(PAGE.read_text())
