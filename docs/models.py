"""Keeps docs/models.md true: its errors are those that the tests measured, its pictures are drawn from its captions.

    python -m pytest --checks docs/checks.json      measures
    python docs/models.py                           writes them into the page, and draws

A section is `## system`, some sentences, a picture with its topology as caption, the definition, and a line of errors.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE, CHECKS, PICTURES = HERE / "models.md", HERE / "checks.json", HERE / "img" / "models"

SECTION = re.compile(r"^## (.+)$", re.M)
PICTURE = re.compile(
    r"!\[[^\]]*\]\(img/models/(?P<name>[\w-]+)\.png\)\n\*`(?P<topology>[^`]+)`, (?P<nodes>\d+) nodes\*"
)
ERRORS = re.compile(r"^Checked against:.*$", re.M)
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)

Checks = dict[str, dict[str, float]]


def sections(text: str) -> dict[str, str]:
    """The sections of the page by their system."""
    _, *parts = SECTION.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def updated(text: str, checks: Checks) -> str:
    """The page with the errors that were measured."""
    head = SECTION.split(text)[0]
    found = sections(text)
    page = TABLE.sub(lambda _: _table(found, checks), head)
    for system, body in found.items():
        page += f"## {system}" + ERRORS.sub(
            lambda _, s=system: "Checked against: " + _errors(checks.get(s, {})) + ".", body
        )
    return page


def _table(found: dict[str, str], checks: Checks) -> str:
    lines = ["| system | as a graph | checked against | largest error |", "|---|---|---|---|"]
    for system, body in found.items():
        peers = checks.get(system, {})
        lines.append(
            f"| [{system}](#{_anchor(system)}) | {_first_sentence(body)} | {', '.join(peers) or '-'} | "
            f"{f'{max(peers.values()):.0e}' if peers else '-'} |"
        )
    return "\n".join(lines) + "\n"


def _errors(peers: dict[str, float]) -> str:
    return ", ".join(f"{peer} ({error:.0e})" for peer, error in peers.items()) or "-"


def _first_sentence(body: str) -> str:
    return " ".join(body.strip().split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def draw(text: str) -> None:
    import matplotlib.pyplot as plt

    from mpnn import graphs

    PICTURES.mkdir(parents=True, exist_ok=True)
    for picture in PICTURE.finditer(text):
        figure, ax = plt.subplots(figsize=(3, 3), layout="constrained")
        graphs.parse(picture["topology"]).bind(int(picture["nodes"])).plot(ax, title="")
        figure.savefig(PICTURES / f"{picture['name']}.png", dpi=80)
        plt.close(figure)


if __name__ == "__main__":
    page = updated(PAGE.read_text(), json.loads(CHECKS.read_text()))
    PAGE.write_text(page)
    draw(page)
