"""`mpnn generate`: text from a model that `mpnn train` or `save_pretrained` wrote."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mpnn.cli.console import as_seed, console, exit_on_invalid_input
from mpnn.cli.tasks import CHARACTERS
from mpnn.cli.view_models import tokenizer_of, transformers_model
from mpnn.data import Characters
from mpnn.models import GPT
from mpnn.models.saving import CONFIG

_BYTES = 256


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
    seed: Annotated[int, typer.Option(help="Random seed.", callback=as_seed)] = 0,
) -> None:
    """Continue a text with a model that mpnn train or save_pretrained saved.

    \b
    Examples:
      mpnn generate runs/train --prompt "If the "
      mpnn generate runs/novel --prompt "Chapter 1" --length 1000 --temperature 0.5
      mpnn generate ./my-llama --prompt "Once upon a time" --length 50
    """
    with exit_on_invalid_input():
        if not prompt:
            raise ValueError("--prompt must have at least one character")
        go_on = _of_transformers if "model_type" in _config(folder) else _of_gpt
        torch.manual_seed(seed)
        text = go_on(folder, prompt, length, temperature)
    console.print(text, markup=False, soft_wrap=True)


def _config(folder: Path) -> Any:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: name a folder that mpnn train or save_pretrained wrote")
    return json.loads((folder / CONFIG).read_text(encoding="utf-8"))


def _of_gpt(folder: Path, prompt: str, length: int, temperature: float) -> str:
    if (kind := _config(folder).get("model")) != "GPT":
        raise ValueError(f"{folder} holds a {kind}; only a GPT continues a text")
    model = GPT.from_pretrained(folder)
    of_bytes = not (folder / CHARACTERS).is_file()
    if not of_bytes:
        characters = Characters((folder / CHARACTERS).read_bytes().decode("utf-8"))
    elif (count := len(model.token.weight)) == _BYTES:
        characters = Characters(map(chr, range(_BYTES)))
        prompt = prompt.encode().decode("latin-1")
    else:
        raise ValueError(
            f"{folder} has no {CHARACTERS}, and its GPT has {count} symbols, not {_BYTES} bytes: write its characters "
            f"into {CHARACTERS}, in the order of their numbers"
        )
    text = characters.decode(model.generate(characters.encode(prompt)[None], length, temperature)[0])
    return text.encode("latin-1").decode(errors="replace") if of_bytes else text


def _of_transformers(folder: Path, prompt: str, length: int, temperature: float) -> str:
    model = transformers_model(str(folder), "AutoModelForCausalLM")
    tokenizer = tokenizer_of(folder)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    inputs = tokenizer(prompt, return_tensors="pt")
    return str(tokenizer.decode(model.generate(**inputs, max_new_tokens=length, **sampling)[0], True))
