"""Updates docs/results.md: writes the table of results/*.json, which the scripts in examples/ record.

python docs/results.py
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
PAGE, RECORDS = HERE / "results.md", HERE.parent / "results"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)
HEADINGS = ("task", "model", "here", "seeds", "published", "hardware", "wall time a seed", "commit", "command")


def experiment() -> ModuleType:
    """The module of the examples that writes the records."""
    spec = importlib.util.spec_from_file_location("experiment", HERE.parent / "examples" / "experiment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def row(record: dict[str, Any]) -> str:
    """A row of the table: mean ± standard deviation over the seeds."""
    names, seeds = record["row"], record["seeds"].values()
    published = " ".join(filter(None, [names["published"], names["source"] and f"({names['source']})"]))
    cells = (
        names["task"],
        names["model"],
        f"**{experiment().summary(record)}** {names['metric']}",
        str(len(seeds)),
        published,
        record["hardware"],
        f"{mean(seed['seconds'] for seed in seeds):,.0f} s",
        record["commit"],
        f"`{record['command']}`",
    )
    return f"| {' | '.join(cells)} |"


def updated(text: str) -> str:
    """The page with the table of all records."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", *map(row, records)]
    return TABLE.sub(lambda _: "\n".join(lines) + "\n", text)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
