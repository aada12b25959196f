"""Folders of models that were tampered with, half written or killed: a whole model comes back, or a ValueError says
why not, in little time and memory."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from damage import mutated
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import EVERY

from mpnn import graphs
from mpnn.models import GPT, Model
from mpnn.models.saving import CONFIG, WEIGHTS

SOME = ("GPT", "GAT", "ImageClassifier", "ReformerLM")
DEEP = json.loads("[" * 300 + "]" * 300)
WRONG: list[Any] = [
    *(None, True, -1, 0, 3, 1000, 2**31, 10**9, 10**30, 10**400, 0.5, 1e308, float("nan")),
    *("", "x", "9" * 10_000, [], [1], {}, [None] * 1000, {"x": 1}, DEEP),
    *({"topology": 5}, {"topology": "window("}, {"topology": "random(1000000000)"}, {"graph": "x"}),
    *({"model": "GPT", "arguments": {}}, {"model": [], "arguments": 5}),
]


def fields(config: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value of a configuration."""
    if above:
        yield above
    for name, part in (
        config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    ):
        yield from fields(part, (*above, name))


def changed(config: Any, field: tuple[Any, ...], value: Any) -> Any:
    config = copy.deepcopy(config)
    at = config
    for name in field[:-1]:
        at = at[name]
    at[field[-1]] = value
    return config


def wrong_values(config: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for field in fields(config):
        for value in WRONG:
            wrong = changed(config, field, value)
            if json.dumps(wrong) != json.dumps(config):
                yield field, wrong


def refuses(kind: type[Model], folder: Path, wrong: Any) -> str | None:
    """What the ValueError says; None where the model loads. Anything else that is raised fails the test."""
    (folder / CONFIG).write_text(json.dumps(wrong))
    try:
        kind.from_pretrained(folder)
    except ValueError as error:
        return str(error)
    return None


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def saved(name: str, folder: Path) -> tuple[type[Model], Any]:
    model = EVERY[name][0]()
    model.save_pretrained(folder)
    return type(model), json.loads((folder / CONFIG).read_text())


def models(quick: int, most: int) -> Any:
    """Some models with so many wrong values each; in the slow suite all of them, with `most`."""
    rows = [(name, quick) for name in SOME] + [pytest.param(name, most, marks=pytest.mark.slow) for name in EVERY]
    return pytest.mark.parametrize(("name", "most"), rows)


@models(quick=300, most=200)
def test_wrong_values_are_named(name: str, most: int, tmp_path: Path) -> None:
    kind, config = saved(name, tmp_path)
    before, wrongs = peak(), list(wrong_values(config))
    for field, wrong in random.Random(0).sample(wrongs, min(most, len(wrongs))):
        sentence = refuses(kind, tmp_path, wrong)
        assert sentence is not None, (field, wrong)
        assert [part for part in field if isinstance(part, str)][-1] in sentence, (field, sentence)
        assert len(sentence) < 1500
    assert peak() - before < 2**26


def forget(folder: Path) -> None:
    """Takes the configuration out of the weights, as in files of other programs."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@models(quick=25, most=80)
def test_a_wrong_value_beside_weights_without_configuration(name: str, most: int, tmp_path: Path) -> None:
    """The sizes in the header are then all there is to compare with; what they allow may load."""
    kind, config = saved(name, tmp_path)
    forget(tmp_path)
    before, wrongs = peak(), list(wrong_values(config))
    for _, wrong in random.Random(0).sample(wrongs, min(most, len(wrongs))):
        refuses(kind, tmp_path, wrong)
    assert peak() - before < 2**28


@pytest.mark.slow
def test_a_pair_that_describes_an_enormous_model_is_refused(tmp_path: Path) -> None:
    """Both files agree; only the header of the weights says that they hold a small one."""
    kind, config = saved("GPT", tmp_path)
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    sizes = (("dim", 10**9), ("dim", 2**19), ("layers", 2**19), ("context", 10**9), ("vocabulary", 2**20))
    for name, value in sizes:
        wrong = changed(config, ("arguments", name), value)
        save_file(tensors, tmp_path / WEIGHTS, {"format": "pt", "config": json.dumps(wrong)})
        before = peak()
        sentence = refuses(kind, tmp_path, wrong)
        assert sentence is not None
        assert name in sentence or "token.weight has shape [17, 16] in the file" in sentence
        assert peak() - before < 2**30


class Hashed(Model):
    """A stranger's model: a large number that is no size, and a large tensor that is no weight."""

    def __init__(self, prime: int = 2**31 - 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), float(prime)))
        self.register_buffer("mask", torch.ones(4096, 4096, dtype=torch.bool).tril(), persistent=False)


def test_a_large_number_that_is_no_size_is_given_again(tmp_path: Path) -> None:
    Hashed().save_pretrained(tmp_path / "default")
    assert Hashed.from_pretrained(tmp_path / "default").mask.all(0)[0]
    Hashed(2**40).save_pretrained(tmp_path / "large")
    with pytest.raises(
        ValueError, match=r"arguments\.prime is 1099511627776, but .* holds 3 numbers; if the value is not a size"
    ):
        Hashed.from_pretrained(tmp_path / "large")
    assert Hashed.from_pretrained(tmp_path / "large", prime=2**40).weight[0] == 2**40


def test_deep_nesting_in_both_files_is_refused(tmp_path: Path) -> None:
    _, config = saved("GPT", tmp_path)
    deep = "[" * 500 + "]" * 500
    text = json.dumps(config).replace("17", deep)
    save_file({}, tmp_path / WEIGHTS, {"config": text.replace(deep, f"[{deep}]")})
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=r"vocabulary|too deeply"):
        GPT.from_pretrained(tmp_path)


def gpt(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(17, 16, 2, 2, graphs.causal() & graphs.window(seed), context=12)


def window_of(folder: Path) -> int:
    """Which model a folder holds; its weights must be those of its configuration."""
    model = GPT.from_pretrained(folder)
    for seed in (1, 2):
        if model.layers[0].graph == graphs.causal() & graphs.window(seed):
            assert all(map(torch.equal, model.state_dict().values(), gpt(seed).state_dict().values()))
            return seed
    raise AssertionError("neither of the two")


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_save_that_is_cut_short_leaves_the_old_pair_or_a_sentence(
    renamed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted when so many of the two files have their names."""
    gpt(1).save_pretrained(tmp_path)
    done = []

    def replace(source: Path, target: Path) -> None:
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(Path(target).name)
        rename(source, target)

    rename = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        if renamed < 2:
            with pytest.raises(KeyboardInterrupt):
                gpt(2).save_pretrained(tmp_path)
        else:
            gpt(2).save_pretrained(tmp_path)
    assert done == [WEIGHTS, CONFIG][:renamed]
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    if renamed == 1:
        with pytest.raises(
            ValueError, match=r"arguments\.graph\.topology is 'causal\(\) & window\(1\)' in config\.json and"
        ):
            GPT.from_pretrained(tmp_path)
    else:
        assert window_of(tmp_path) == (1 if renamed == 0 else 2)


def save_for_ever(folder: Path) -> None:
    models = gpt(1), gpt(2)
    models[0].save_pretrained(folder)
    (folder.parent / "saved").touch()
    while True:
        for model in models:
            model.save_pretrained(folder)


@pytest.mark.slow
def test_kill_9_at_random_moments_of_saves(tmp_path: Path) -> None:
    draw, outcomes = random.Random(0), []
    folder, saved = tmp_path / "model", tmp_path / "saved"
    for _ in range(20):
        process = forked.process(save_for_ever, folder)
        process.start()
        while not saved.exists():
            assert process.is_alive()
            time.sleep(0.001)
        saved.unlink()
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        process.join()
        try:
            outcomes.append(str(window_of(folder)))
        except ValueError as error:
            assert "Save the model again" in str(error)  # noqa: PT017
            outcomes.append("sentence")
    assert {"1", "2"} & set(outcomes)
    gpt(1).save_pretrained(folder)
    assert window_of(folder) == 1
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_files_that_were_changed_at_random(tmp_path: Path) -> None:
    """Either file with random bytes changed, cut or inserted, an oversized header among them."""
    _, config = saved("GPT", tmp_path)
    wholes = {name: (tmp_path / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    header = int.from_bytes(wholes[WEIGHTS][:8], "little")
    sizes = [2**63, 2**64 - 1, 10**8, header + 1, header - 1, 0]
    files = [(WEIGHTS, size.to_bytes(8, "little") + wholes[WEIGHTS][8:]) for size in sizes]
    draw = random.Random(0)
    files += [(CONFIG, mutated(wholes[CONFIG], draw)) for _ in range(100)]
    files += [
        (WEIGHTS, mutated(wholes[WEIGHTS][: header + 8], draw) + wholes[WEIGHTS][header + 8 :]) for _ in range(100)
    ]
    before = peak()
    for name, content in files:
        (tmp_path / name).write_bytes(content)
        try:
            model = GPT.from_pretrained(tmp_path)
        except ValueError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017
        else:
            assert json.loads((tmp_path / CONFIG).read_text()) == config
            assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
        (tmp_path / name).write_bytes(wholes[name])
    assert peak() - before < 2**26


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_file_and_a_folder_in_its_place(name: str, tmp_path: Path) -> None:
    gpt(1).save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=f"there is no .*{name}"):
            GPT.from_pretrained(tmp_path)
        (tmp_path / name).mkdir(exist_ok=True)
