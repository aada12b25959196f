"""The HTML file of the viewer: its data as JSON, and the JavaScript that shows them; the graphs that its Graph pane
offers, and the runs of graphs that a browser cannot make."""

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from mpnn.graph import Graph
from mpnn.graphs.parse import BUILDERS, parse

SCRIPT = Path(__file__).parent / "static" / "viewer.js"

_HEIGHT = 820  # pixels of the frame in a notebook

_STYLE = """
body { margin: 0; background: #fff; }
@media (prefers-color-scheme: dark) { body { background: #14181d; } }
noscript { display: block; max-width: 40rem; margin: 3rem auto; font: 1rem/1.5 system-ui, sans-serif; }
"""


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
        title, subtitle: its heading, and a sentence below.
        graph: `expression`, `n` and `num_src` (None: the same as `n`) of the graph that the page opens with; None for a
            page without the panes of expressions.
        attention: as `mpnn.view.attention.attention` returns it; None for a page without attention.
        plan: as `mpnn.view.topology.plan_data` returns it; None for a page without a plan.
    """

    title: str
    subtitle: str
    graph: Mapping[str, Any] | None = None
    attention: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None

    def html(self) -> str:
        """Returns the document, which needs no other files."""
        return document(self.title, _STYLE, f"{self.part('main')}\n{script()}")

    def part(self, tag: str = "div") -> str:
        """Returns an element for another document, which needs `script()` at its end. No heading if `title` is ""."""
        content = asdict(self)
        if self.graph is not None:
            content["examples"] = examples()
        data = json.dumps(content, allow_nan=False).replace("<", "\\u003c")  # no text can end the element
        return (
            f'<{tag} class="mpnn-viewer"><noscript>This page draws graphs with JavaScript, which is switched off.'
            f'</noscript></{tag}>\n<script type="application/json" class="mpnn-data">{data}</script>'
        )

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame of its own, which neither reads nor changes the notebook."""
        style = f"width: 100%; height: {_HEIGHT}px; border: 0"
        return f'<iframe title="{escape(self.title)}" srcdoc="{escape(self.html())}" style="{style}"></iframe>'


def document(title: str, style: str, body: str) -> str:
    """An HTML file of its own, for light and dark mode; `style` is CSS, `body` HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def script() -> str:
    """The element that shows all parts before it."""
    code = SCRIPT.read_text(encoding="ascii").replace("</script", "<\\/script")
    return f'<script type="module">{code}</script>'


EXAMPLES = (
    ("BERT", "complete", 64),
    ("GPT", "causal", 64),
    ("Mistral", "causal & window(16)", 64),
    ("Longformer", "longformer(8, globals=1)", 64),
    ("BigBird", "bigbird(block=4, window=3, random=2, globals=1)", 96),
    ("Sparse Transformer", "strided(8)", 64),
    ("Swin", "windows(8, 8, 4)", 64),
    ("pixels", "grid(8, 8)", 64),
    ("100,000 nodes", "causal & (window(2048) | global_nodes(64))", 100_000),
)
"""What a graph is known by, its expression, and the number of its nodes."""

RANDOM = {"random", "expander", "bigbird"}
"""The builders whose edges come from numpy's generator: `RANDOM` in `viewer/src/graph/builders.ts`."""

_CALLS = re.compile(r"[A-Za-z_]\w*(?=\()")


def examples() -> list[dict[str, Any]]:
    """Returns the Example of `viewer/src/data.ts`."""
    return [_example(*one) for one in EXAMPLES]


@cache
def _example(name: str, expression: str, n: int) -> dict[str, Any]:
    topology = parse(expression)
    data = {"name": name, "expression": expression, "n": n, "num_src": None}
    return data | ({"runs": runs(topology.bind(n))} if needs_runs(repr(topology)) else {})


def needs_runs(expression: str) -> bool:
    """Whether the browser cannot make the graph: a builder draws random numbers, or is one of the user's."""
    return bool(set(_CALLS.findall(expression)) - (BUILDERS.keys() - RANDOM))


def runs(graph: Graph) -> dict[str, str]:
    """Returns the RunsData of `viewer/src/data.ts`."""
    arrays = {name: getattr(graph.runs, name).astype("<i4").tobytes() for name in ("ptr", "start", "stop")}
    return {name: b64encode(array).decode("ascii") for name, array in arrays.items()}
