"""Updates docs/results.md: writes its tables from benchmarks/results/examples/*.json, which the scripts in examples/
record.

A table is between `<!-- records: TASK; TASK -->` and `<!-- end -->`: the records whose task begins with one of
these, and the commands that made them.

python docs/results.py
"""

import importlib.util
import json
import re
import sys
import textwrap
from itertools import chain
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
PAGE, RECORDS = HERE / "results.md", HERE.parent / "benchmarks" / "results" / "examples"
TABLE = re.compile(r"(?<=<!-- records: )(.*?) -->\n.*?(?=<!-- end -->)", re.S)
HEADINGS = ("task", "model", "here", "published", "seeds", "time a seed")


def experiment() -> ModuleType:
    """The module of the examples that writes the records."""
    spec = importlib.util.spec_from_file_location("experiment", HERE.parent / "examples" / "experiment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def table(records: list[dict[str, Any]]) -> str:
    """A table of records, one row each, and the commands that made them, with machine and commits."""
    commands: dict[str, list[str]] = {}
    for record in records:
        commands.setdefault(record["command"], []).append(f"{record['row']['model']} {record['commit']}")
    hardware = sorted({record["hardware"] for record in records})
    return "\n".join(
        [
            f"| {' | '.join(HEADINGS)} |",
            "|---" * len(HEADINGS) + "|",
            *map(row, records),
            "",
            f"On {', '.join(hardware)}, with the commit of each:",
            "",
            "```sh",
            *chain.from_iterable(commented(*item) for item in sorted(commands.items())),
            "```",
            "",
        ]
    )


def commented(command: str, models: list[str]) -> list[str]:
    """A command below what it computes, in lines of at most 88 columns."""
    head, *rest = textwrap.wrap("; ".join(models), 86)
    return [
        f"# {head}",
        *(f"# {line}" for line in rest),
        " \\\n    ".join(textwrap.wrap(command, 82)),
    ]


def row(record: dict[str, Any]) -> str:
    """A row of a table: mean ± standard deviation over the seeds."""
    names, seeds = record["row"], record["seeds"].values()
    published = " ".join(filter(None, [names["published"], names["source"] and f"({names['source']})"]))
    cells = (
        names["task"],
        names["model"],
        f"**{experiment().summary(record)}** {names['metric']}",
        published if names["published"] != "none" else "",
        str(len(seeds)),
        f"{mean(seed['seconds'] for seed in seeds):,.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def updated(text: str) -> str:
    """The page with the tables of all records.

    Raises:
        ValueError: if a record is in no table, or in two.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]
    shown: list[str] = []

    def filled(match: re.Match[str]) -> str:
        tasks = tuple(match[1].split("; "))
        chosen = [record for record in records if record["row"]["task"].startswith(tasks)]
        shown.extend(record["row"]["name"] for record in chosen)
        return f"{match[1]} -->\n{table(chosen)}"

    text = TABLE.sub(filled, text)
    names = sorted(record["row"]["name"] for record in records)
    if sorted(shown) != names:
        raise ValueError(f"each record belongs into one table of {PAGE}; the records are {names}, shown are {shown}")
    return text


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
