"""Makes the whole suite headless, offline and repeatable, and says on which real data it runs.

Fixtures of a single topic live in that topic's test file, not here.
"""

import os

# Read once, when matplotlib, OpenMP and the tokenizers load: so before the imports below.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("KMP_WARNINGS", "0")  # OpenMP writes about forks and deprecations past Python's filters
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a test that fails at random
os.environ.pop("COLUMNS", None)  # consoles that are made while it is set keep it: see `wide`
os.environ["MPNN_CACHE"] = os.path.join(os.path.dirname(__file__), "no such folder")  # prices as shipped

import gc
import json
import random
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from grids import leave_out_what_is_covered
from real_data import locate_module, no_network

# No deadline, because the first call of a compiled kernel takes seconds; the same examples in every run, so that
# a failure can be repeated.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# Tensors here are small: a second thread brings nothing, and on a busy machine each operation waits for it.
torch.set_num_threads(1)

# Parameters that are drawn while tests are collected are the same in every process: their ids must be.
torch.manual_seed(0)


CHECKS = pytest.StashKey[dict[str, dict[str, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--checks", metavar="FILE", help="write the errors that tests measured against peers, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Makes `MPNN_DATA` absolute, as tests change folders; a wrong one must not pass for a machine without data."""
    config.stash[CHECKS] = {}
    if config.getoption("--checks") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--checks collects the errors of one process; leave out -n")
    if not (given := os.environ.get("MPNN_DATA")):
        return
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir():
        raise pytest.UsageError(f"MPNN_DATA is {given!r}, which is no folder; point it at the data or unset it")
    os.environ["MPNN_DATA"] = str(folder)


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_out_what_is_covered(items)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the garbage collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"MPNN_DATA: {os.environ.get('MPNN_DATA') or 'not set, tests on real data may be skipped'}"


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test downloads a dataset; one that is about downloads puts an opener of its own in this one's place."""
    monkeypatch.setattr(locate_module, "_open", no_network)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences are not wrapped, whatever the terminal."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`measured(system, peer, error, bound)`: the error is at most the bound, and goes into `docs/models.md`.

    `system` is a row of that page, `peer` the reference, `error` the largest absolute difference, and `bound` what
    roundings explain (`error_bound`).
    """

    def measured(system: str, peer: str, error: float, bound: float) -> None:
        assert error <= bound, f"{system}: {error:.2e} away from {peer}, allowed {bound:.2e}"
        errors = request.config.stash[CHECKS].setdefault(system, {})
        errors[peer] = max(errors.get(peer, 0.0), float(error))

    return measured


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := session.config.getoption("--checks"):
        found = {system: dict(sorted(peers.items())) for system, peers in sorted(session.config.stash[CHECKS].items())}
        Path(path).write_text(json.dumps(found, indent=2) + "\n")
