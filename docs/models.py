"""Updates docs/models.md: writes the measured errors into the page and draws its pictures from their captions.

    python -m pytest --checks=docs/checks.json      measures the errors
    python docs/models.py                           writes them into the page and draws the pictures

A section has a title `## system`, a description and, folded, a picture with its topology as caption, the definition,
and a line of errors.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))

from model_pictures import DRAWN

from mpnn import Graph, graphs
from mpnn.models.layers import positions

HERE = Path(__file__).parent
PAGE, CHECKS, PICTURES = HERE / "models.md", HERE / "checks.json", HERE / "img" / "models"

SECTION = re.compile(r"^## (.+)$", re.M)
PICTURE = re.compile(
    r"!\[[^\]]*\]\(img/models/(?P<name>[\w-]+)\.png\)"
    r"(?:\n\*(?:for example )?`(?P<topology>[^`]+)`, (?P<nodes>\d+) nodes\*)?"
)
ERRORS = re.compile(r"^Checked against:.*$", re.M)
CITATION = re.compile(r" \([^()]*\d{4}[^()]*\)")
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)

Checks = dict[str, dict[str, float]]


def sections(text: str) -> dict[str, str]:
    """The sections of the page by their system."""
    _, *parts = SECTION.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def updated(text: str, checks: Checks) -> str:
    """The page with the measured errors."""
    head = SECTION.split(text)[0]
    bodies = sections(text)
    page = TABLE.sub(lambda _: _table(bodies, checks), head)
    for system, body in bodies.items():
        page += f"## {system}" + ERRORS.sub(
            lambda _, s=system: "Checked against: " + _errors(checks.get(s, {})) + ".", body
        )
    return page


def _table(bodies: dict[str, str], checks: Checks) -> str:
    lines = ["| system | checked against | largest error |", "|---|---|---|"]
    for system in bodies:
        peers = checks.get(system, {})
        error = f"{max(peers.values()):.1e}" if peers else "-"
        lines.append(f"| [{system}](#{anchor(system)}) | {'; '.join(peers) or '-'} | {error} |")
    return "\n".join(lines) + "\n"


def _errors(peers: dict[str, float]) -> str:
    return "; ".join(f"{peer} ({error:.1e})" for peer, error in peers.items()) or "-"


def first_sentence(body: str) -> str:
    """The first sentence of a section, without citations."""
    paragraph = " ".join(body.strip().split("\n\n")[0].split())
    return CITATION.sub("", paragraph).split(". ")[0].rstrip(".")


def anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def draw(text: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for picture in PICTURE.finditer(text):
        if picture["name"] not in DRAWN and picture["topology"] is None:
            continue  # drawn below
        with _saved(picture["name"], plt.subplots(figsize=(3, 3), layout="constrained")) as ax:
            if picture["name"] in DRAWN:
                DRAWN[picture["name"]](ax)
            else:
                graphs.parse(picture["topology"]).bind(int(picture["nodes"])).plot(ax, title="")
    with _saved("reformer", plt.subplots(figsize=(3, 3), layout="constrained")) as ax:
        _hashed().plot(ax, title="")
    with _saved("moba", plt.subplots(figsize=(3, 3), layout="constrained")) as ax:
        _chosen().plot(ax, title="")
    with _saved("positional-encodings", plt.subplots(1, 3, figsize=(8, 3), layout="constrained")) as axes:
        _positions(axes)


@contextmanager
def _saved(name: str, drawn: tuple[Figure, Any]) -> Iterator[Any]:
    figure, axes = drawn
    yield axes
    figure.savefig(PICTURES / f"{name}.png", dpi=80)
    plt.close(figure)


def _hashed() -> Graph:
    """24 nodes in a random order, as of a hash, in chunks of 4."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    return graphs.chunks(order[None], size=4, num_nodes=24)


def _chosen() -> Graph:
    """24 nodes in blocks of 4: each attends to its own block and to the two others of largest random numbers."""
    own = torch.arange(24)[:, None] // 4 == torch.arange(6)
    numbers = torch.rand(24, 6, generator=torch.Generator().manual_seed(0)).masked_fill(own, 2.0)
    earlier = torch.arange(6) <= torch.arange(24)[:, None] // 4
    best = numbers.masked_fill(~earlier, -1.0).topk(3).indices
    chosen = torch.zeros(24, 6, dtype=torch.bool).scatter(1, best, True)
    return graphs.blocks(chosen, 4, 24) & graphs.causal().bind(24)


def _positions(axes: Any) -> None:
    """48 positions down, the numbers of their encodings across."""
    encodings = {
        "sinusoidal": positions.sinusoidal(48, 32),
        "binary": torch.arange(48)[:, None] >> torch.arange(6) & 1,
        "normalized": torch.linspace(0, 1, 48),
    }
    for ax, (name, numbers) in zip(axes, encodings.items(), strict=True):
        rows = numbers.reshape(48, -1)
        ax.imshow(rows, aspect="auto", cmap="cividis", interpolation="nearest")
        ax.set(title=name, xlabel="number", ylabel="position")
        if rows.shape[1] == 1:
            ax.set_xticks([0])


if __name__ == "__main__":
    page = updated(PAGE.read_text(), json.loads(CHECKS.read_text()))
    PAGE.write_text(page)
    draw(page)
