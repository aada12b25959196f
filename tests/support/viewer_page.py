"""Runs `mpnn view` and reads the data in the page that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from mpnn.cli.app import app


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["view", *map(str, arguments)])


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="mpnn-data">(.*?)</script>', html, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data
