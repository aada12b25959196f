"""`mpnn generate`: text from a model that `mpnn train` or `save_pretrained` wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mpnn.cli.console import console, exit_on_invalid_input
from mpnn.cli.tasks import CHARACTERS
from mpnn.cli.view_models import transformers_model
from mpnn.data import Characters
from mpnn.models import GPT
from mpnn.models.saving import CONFIG

_BYTES = 256

Continue = Callable[[str, int, float], str]
"""`go_on(prompt, length, temperature)`: the prompt and `length` more symbols."""


def generate(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="The folder of a run on text, or of a decoder of transformers with its tokenizer, or of a GPT over "
            "256 bytes.",
            file_okay=False,
        ),
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "\n",
    length: Annotated[
        int, typer.Option(help="Number of characters to generate; of tokens for a model of transformers.", min=1)
    ] = 300,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest symbol.", min=0.0)] = 0.8,
    seed: Annotated[int, typer.Option(help="Random seed.", min=-(2**63), max=2**63 - 1)] = 0,
) -> None:
    """Continue a text with a model that mpnn train or save_pretrained saved.

    \b
    Examples:
      mpnn generate runs/train --prompt "If the "
      mpnn generate runs/novel --prompt "Chapter 1" --length 1000 --temperature 0.5
      mpnn generate ./my-llama --prompt "Once upon a time" --length 50
    """
    with exit_on_invalid_input():
        go_on = _loaded(folder)
        if not prompt:
            raise ValueError("--prompt must have at least one character")
        torch.manual_seed(seed)
        text = go_on(prompt, length, temperature)
    console.print(text, markup=False, soft_wrap=True)


def _loaded(folder: Path) -> Continue:
    if (folder / CHARACTERS).is_file():
        characters = Characters((folder / CHARACTERS).read_bytes().decode("utf-8"))
        return _of_gpt(GPT.from_pretrained(folder), characters.encode, characters.decode)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {CONFIG}: name a folder that mpnn train or save_pretrained wrote") from None
    if "model_type" in config:
        return _of_transformers(folder)
    if config.get("model") != "GPT":
        raise ValueError(f"{folder} holds a {config.get('model')}; only a GPT continues a text")
    model = GPT.from_pretrained(folder)
    if len(model.token.weight) != _BYTES:
        raise ValueError(
            f"{folder} has no {CHARACTERS}, and its GPT has {len(model.token.weight)} symbols, not {_BYTES} bytes: "
            f"write its characters into {CHARACTERS}, in the order of their numbers"
        )
    return _of_gpt(
        model,
        lambda text: torch.tensor(list(text.encode())),
        lambda tokens: bytes(tokens.tolist()).decode(errors="replace"),
    )


def _of_gpt(model: GPT, encode: Callable[[str], Any], decode: Callable[[Any], str]) -> Continue:
    def go_on(prompt: str, length: int, temperature: float) -> str:
        return decode(model.generate(encode(prompt)[None], length, temperature)[0])

    return go_on


def _of_transformers(folder: Path) -> Continue:
    model = transformers_model(str(folder), "AutoModelForCausalLM")
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        raise ValueError(f"{folder} has no tokenizer; write it there with tokenizer.save_pretrained") from None

    def go_on(prompt: str, length: int, temperature: float) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling["temperature"] = temperature
        return str(tokenizer.decode(model.generate(**inputs, max_new_tokens=length, **sampling)[0], True))

    return go_on
