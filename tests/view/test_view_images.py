"""`mpnn view MODEL --image FILE`: the page shows the image that the model saw, and the weights that it computed."""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from viewer_page import data_of, run, weights_of

from mpnn import graphs, models
from mpnn.models.layers.images import with_class_token

Image = pytest.importorskip("PIL.Image")
hf = pytest.importorskip("transformers")

ROUNDED = 0.5 / 255 + 1e-6  # roots of weights are rounded to 255ths
VIT = models.ViTConfig(image=[8, 12], patch=4, channels=1, dim=16, layers=2, heads=2, hidden=16)


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gradient of 24 x 24 pixels."""
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(np.arange(24 * 24 * 3, dtype=np.uint16).astype(np.uint8).reshape(24, 24, 3)).save(file)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ViT of transformers: 3 x 3 patches of 8 x 8 pixels."""
    place = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
    hf.ViTModel(hf.ViTConfig(image_size=24, patch_size=8, initializer_range=1.0, **sizes)).save_pretrained(place)
    hf.ViTImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT of mpnn over the neighbors of each of 2 x 3 patches, within a classifier."""
    place = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    models.ImageClassifier(models.ViT(VIT, graphs.neighborhood(2, 3, 1)), 10).save_pretrained(place)
    return place


def test_a_vision_model_of_transformers(folder: Path, photo: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(folder, "--image", photo, "-o", page)
    assert done.exit_code == 0, done.output
    data = data_of(page.read_text())
    shown = data["attention"]
    assert {key: shown["subject"][key] for key in ("kind", "rows", "columns", "extra")} == {
        "kind": "patches",
        "rows": 3,
        "columns": 3,
        "extra": ["[CLS]"],
    }
    pixels = np.asarray(Image.open(io.BytesIO(b64decode(shown["subject"]["image"].split(",")[1]))))
    assert (pixels == np.asarray(Image.open(photo))).all()
    model = hf.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    inputs = hf.ViTImageProcessorPil.from_pretrained(folder)(images=Image.open(photo), return_tensors="pt")
    with torch.no_grad():
        exact = torch.cat(model(**inputs, output_attentions=True).attentions).flatten(0, 1).numpy()
    own, near = shown["graphs"]
    assert np.abs(np.sqrt(weights_of(shown, own)) - np.sqrt(exact)).max() <= ROUNDED
    assert near["name"] == "neighborhood(3, 3, 1)"
    inside = with_class_token(graphs.neighborhood(3, 3, 1)).bind(10).dense().numpy()
    assert (weights_of(shown, near)[:, ~inside] == 0).all()
    assert data["graph"] == {"expression": "neighborhood(3, 3, 1)", "n": 9, "num_src": None}


SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
TOWER = {"image_size": 24, "patch_size": 8, "intermediate_size": 16, **SIZES}
FAMILIES: dict[str, tuple[Callable[[], Any], int]] = {
    "BEiT": (lambda: hf.BeitModel(hf.BeitConfig(**TOWER)), 1),
    "CLIP": (lambda: hf.CLIPModel(hf.CLIPConfig(vision_config=TOWER, text_config={"vocab_size": 9, **SIZES})), 1),
    "DINOv2 with registers": (
        lambda: hf.Dinov2WithRegistersModel(
            hf.Dinov2WithRegistersConfig(image_size=24, patch_size=8, num_register_tokens=2, **SIZES)
        ),
        3,
    ),
    "DeiT": (lambda: hf.DeiTModel(hf.DeiTConfig(**TOWER)), 2),
    "SigLIP": (lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**TOWER)), 0),
}
"""Small models, and how many nodes each has before its patches."""


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_families_with_other_nodes_before_the_patches(family: str, photo: Path, tmp_path: Path) -> None:
    build, extra = FAMILIES[family]
    torch.manual_seed(0)
    build().save_pretrained(tmp_path / "model")
    hf.ViTImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "model")
    done = run(tmp_path / "model", "--image", photo, "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    shown = data_of((tmp_path / "page.html").read_text())["attention"]
    assert len(shown["subject"]["extra"]) == extra
    model = hf.AutoModel.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    model = getattr(model, "vision_model", model)
    inputs = hf.ViTImageProcessorPil.from_pretrained(tmp_path / "model")(images=Image.open(photo), return_tensors="pt")
    with torch.no_grad():
        exact = torch.cat(model(**inputs, output_attentions=True).attentions).flatten(0, 1).numpy()
    own, near = shown["graphs"]
    assert np.abs(np.sqrt(weights_of(shown, own)) - np.sqrt(exact)).max() <= ROUNDED
    neighbors = graphs.neighborhood(3, 3, 1)
    for _ in range(extra):
        neighbors = with_class_token(neighbors)
    assert (weights_of(shown, near)[:, ~neighbors.bind(9 + extra).dense().numpy()] == 0).all()


@pytest.mark.parametrize("kind", ["picture", "array"])
def test_a_vit_of_mpnn(kind: str, saved: Path, photo: Path, tmp_path: Path) -> None:
    page, values = tmp_path / "page.html", torch.randn(8, 12)
    if kind == "array":
        file = tmp_path / "values.npy"
        np.save(file, values.numpy())
    else:
        file = photo
        gray = np.asarray(Image.open(photo).resize((12, 8)).convert("L"))
        values = torch.tensor(gray) / 127.5 - 1
    done = run(saved, "--image", file, "--graph", "", "--graph", "complete", "-o", page)
    assert done.exit_code == 0, done.output
    shown = data_of(page.read_text())["attention"]
    vit = models.ImageClassifier.from_pretrained(saved).encoder
    complete = models.ViT(VIT)
    complete.load_state_dict(vit.state_dict())
    for model, graph in zip((vit, complete.eval()), shown["graphs"], strict=True):
        with torch.no_grad():
            exact = torch.cat(model(values[None, None], return_weights=True).weights).flatten(0, 1).numpy()
        assert np.abs(np.sqrt(weights_of(shown, graph)) - np.sqrt(exact)).max() <= ROUNDED + 1e-3
    assert [graph["name"] for graph in shown["graphs"]] == ["its own graph", "complete"]


def test_refusals(folder: Path, saved: Path, photo: Path, tmp_path: Path) -> None:
    text, wrong, swin, gpt = (tmp_path / name for name in ("a.txt", "wrong.npy", "swin", "gpt"))
    text.write_text("no image")
    np.save(wrong, np.zeros((1, 8, 8)))
    config = models.SwinConfig(image=8, patch=2, channels=1, dim=8, depths=(1,), heads=(1,), window=2)
    models.ImageClassifier(models.Swin(config), 2).save_pretrained(swin)
    models.GPT(6, 8, 2, 1, graphs.causal(), context=4).save_pretrained(gpt)
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        ((folder,), f"{folder} is a model of images; name one with --image"),
        ((folder, "--text", "a"), "is a model of images, which takes --image; leave out --text"),
        ((folder, "--image", text), f"{text} is no image that Pillow reads"),
        ((folder, "--image", photo, "--graph", "neighborhood(9, 9, 1)"), "neighborhood"),
        ((saved, "--image", wrong), f"{wrong} must be [1, 8, 12]: channels, height, width; got [1, 8, 8]"),
        ((saved, "--image", tmp_path / "none.png"), "No such file"),
        ((swin, "--image", photo), "holds a Swin without its data; the page shows runs of mpnn train"),
        ((gpt, "--text", "a"), "holds a GPT without its data"),
        (("causal", "--image", photo), "--text, --image, --node and --graph are for models; causal is an expression"),
    ]
    for arguments, sentence in cases:
        done = run(*arguments, "-o", tmp_path / "page.html")
        assert done.exit_code == 2, done.output
        assert sentence in " ".join(done.stderr.split())
    assert not (tmp_path / "page.html").exists()
