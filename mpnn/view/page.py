"""The HTML file of the viewer: its data as JSON, and the JavaScript that shows them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from mpnn.view.examples import examples

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
