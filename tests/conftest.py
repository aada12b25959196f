"""Makes the whole suite headless, offline and repeatable, and is the one place that knows where real data is.

Fixtures of a single topic live in that topic's test file, not here.
"""

import os

# Read once, when matplotlib, OpenMP and the tokenizers load: so before the imports below.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("KMP_WARNINGS", "0")  # OpenMP writes about forks and deprecations past Python's filters
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a test that fails at random

import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# No deadline, because the first call of a compiled kernel takes seconds; the same examples in every run, so that a
# failure can be repeated.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets that ``MPNN_DATA`` names; skips the test when the variable is not set."""
    root = os.environ.get("MPNN_DATA")
    if root is None:
        pytest.skip("needs real data: set MPNN_DATA to the folder that holds planetoid/, multi30k/, tu/, ...")
    path = Path(root)
    if not path.is_dir():
        # A wrong path must not pass for a machine without data.
        pytest.fail(f"MPNN_DATA is {root!r}, which is not a folder; point it at the data or unset it")
    return path
