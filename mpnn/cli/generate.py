"""`mpnn generate`: text from a model that `mpnn train` saved."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from mpnn.cli.console import console, exit_on_invalid_input, refuse
from mpnn.cli.tasks import CHARACTERS
from mpnn.data import Characters
from mpnn.models import GPT


def generate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run on text.", file_okay=False)],
    prompt: Annotated[str, typer.Option(help="The text to continue, in characters of the training text.")] = "\n",
    length: Annotated[int, typer.Option(help="Number of characters to generate.")] = 300,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest character.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Random seed.", min=-(2**63), max=2**63 - 1)] = 0,
) -> None:
    """Continue a text with a model that mpnn train saved.

    \b
    Examples:
      mpnn generate runs/train --prompt "If the "
      mpnn generate runs/novel --prompt "Chapter 1" --length 1000 --temperature 0.5
    """
    if not (folder / CHARACTERS).is_file():
        refuse(f"{folder} has no {CHARACTERS}: name a folder that mpnn train saved a finished run on text in")
    with exit_on_invalid_input():
        characters = Characters((folder / CHARACTERS).read_bytes().decode("utf-8"))
        model = GPT.from_pretrained(folder)
        if not prompt:
            raise ValueError("--prompt must have at least one character")
        tokens = characters.encode(prompt)[None]
        generator = torch.Generator().manual_seed(seed)
        text = characters.decode(model.generate(tokens, length, temperature, generator=generator)[0])
    console.print(text, markup=False, soft_wrap=True)
