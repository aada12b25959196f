"""Runs `mpnn view`, and reads the data in the page that it writes."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner, Result

from mpnn.cli.app import app


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["view", *map(str, arguments)])


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" class="mpnn-data">(.*?)</script>', html, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def weights_of(data: dict[str, Any], graph: dict[str, Any]) -> np.ndarray:
    """The attention weights of a graph as the page stores them, [heads of all layers, N, N]."""
    heads, top = sum(data["heads"]), graph["top"]
    sources = np.frombuffer(b64decode(graph["sources"]), "<u2").reshape(heads, -1, top)
    kept = (np.frombuffer(b64decode(graph["weights"]), np.uint8).reshape(sources.shape) / 255) ** 2
    n = sources.shape[1]
    full = np.zeros((heads, n, n))
    for row in np.ndindex(heads, n):
        np.add.at(full[row], sources[row], kept[row])
    return full
