"""The page of the demo: one HTML file with embedded pictures, for light and dark mode."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from mpnn.view import Page

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #5f6b7a; --line: #dde2e8; --paper: #fff; --soft: #f5f7f9;
  --accent: #12588f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --muted: #9aa7b6; --line: #333c47; --paper: #14181d;
  --soft: #1c2229; --accent: #84b9dc; } }
body, body > *, .card { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 3rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
body > h1 { font-size: 2.2rem; line-height: 1.2; margin: 0 0 .8rem; letter-spacing: -.01em; }
body > h2 { font-size: 1.5rem; margin: 3.5rem 0 .6rem; padding-top: 1.5rem; border-top: 1px solid var(--line); }
body > h3 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
body > p { max-width: 46rem; margin: .5rem 0 1rem; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: .92em; }
body > h3 code { color: var(--accent); font-size: 1em; }
.scroll { overflow-x: auto; margin: 1.5rem 0 .5rem; }
.scroll table { border-collapse: collapse; width: 100%; font-size: .95rem; font-variant-numeric: tabular-nums; }
.scroll th { font-weight: 600; color: var(--muted); border-bottom: 2px solid var(--line); }
.scroll th, .scroll td { padding: .5rem .9rem .5rem 0; white-space: nowrap; }
.scroll td { border-bottom: 1px solid var(--line); }
.scroll :is(th, td) { text-align: right; }
.scroll :is(th, td):is(:nth-child(-n+2), :nth-child(5)) { text-align: left; }
.scroll :is(th, td):last-child { padding-right: 0; }
.narrow figure { margin: 1rem 0; }
.narrow img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 8px; padding: .6rem; }
.narrow figcaption, .legend { color: var(--muted); font-size: .92rem; line-height: 1.5; margin: .5rem 0 0;
  max-width: 46rem; }
.legend { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin-top: 1rem; }
.legend dt { font-weight: 600; }
.legend dd { margin: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem; margin: 1.8rem 0; }
.card { border: 1px solid var(--line); border-radius: 10px; background: var(--soft); padding: 1rem 1.2rem; }
.card b { display: block; font-size: 1.9rem; line-height: 1.2; color: var(--accent); letter-spacing: -.02em; }
.card span { color: var(--muted); font-size: .95rem; line-height: 1.45; display: block; margin-top: .3rem; }
.viewer { border: 1px solid var(--line); border-radius: 8px; margin: 1.2rem 0; padding: .2rem 0; }
body .viewer .mpnn-viewer { padding: .8rem 1rem; max-width: none; }
.narrow { max-width: 46rem; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1.1rem;
  margin: .5rem 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .9rem; line-height: 1.5; }
pre b { color: var(--accent); }
footer { margin-top: 4rem; padding-top: 1.2rem; border-top: 1px solid var(--line); color: var(--muted);
  font-size: .9rem; }
footer code { overflow-wrap: anywhere; }
"""


def cards(facts: Mapping[str, str]) -> str:
    """Large words or numbers, each with its meaning below."""
    inner = "".join(f'<div class="card"><b>{escape(k)}</b><span>{escape(v)}</span></div>' for k, v in facts.items())
    return f'<div class="cards">{inner}</div>'


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def continuation(prompt: str, text: str) -> str:
    """A text that a model wrote, after its prompt in bold."""
    return f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre>"


def heading(level: int, text: str, *, as_code: bool = False) -> str:
    inner = f"<code>{escape(text)}</code>" if as_code else escape(text)
    return f"<h{level}>{inner}</h{level}>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{_cell(k, cell)}</td>" for k, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _cell(column: int, text: str) -> str:
    return f"<code>{escape(text)}</code>" if column == 1 else escape(text)


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def legend(meanings: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in meanings.items())
    return f'<dl class="legend">{items}</dl>'


def picture(path: Path, alt: str, caption: str) -> str:
    """An image file (PNG), embedded, with its alternative text and caption."""
    image = f'<img alt="{escape(alt)}" src="data:image/png;base64,{b64encode(path.read_bytes()).decode()}">'
    return f'<div class="narrow"><figure>{image}<figcaption>{escape(caption)}</figcaption></figure></div>'


def viewer(shown: Page) -> str:
    """Panes of the viewer. The document needs `mpnn.view.page.script()` at its end."""
    return f'<div class="viewer">{shown.part()}</div>'


def page(title: str, parts: Sequence[str], footer: Sequence[tuple[str, str]], script: str = "") -> str:
    """The HTML document; `parts` and `script` are HTML, `footer` is names and values as text."""
    facts = "<br>\n".join(f"{escape(name)}: <code>{escape(value)}</code>" for name, value in footer)
    body = "\n\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n\n<footer>{facts}</footer>\n{script}\n</body>\n</html>\n"
    )
