"""`mpnn eval`: measures a model that `mpnn train` saved, on the data that it was not trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mpnn.cli.console import console, exit_on_invalid_input, refuse
from mpnn.cli.options import Options
from mpnn.cli.train import FINISHED
from mpnn.train.checkpoint import differences


def eval(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.", file_okay=False)],
) -> None:
    """Measure a model that mpnn train saved, on the held-out part of its data.

    The data must be where it was during training, and unchanged.
    \b
    Example:
      mpnn eval runs/train
    """
    path = folder / FINISHED
    if not path.is_file():
        refuse(f"{folder} has no {FINISHED}: name a folder that mpnn train saved a finished run in")
    with exit_on_invalid_input():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            options, settings = Options.read(content["options"]), dict(content["settings"])
        except (ValueError, KeyError, TypeError) as error:
            refuse(f"{path} is damaged or of another version of mpnn ({error}); train the model again")
        run = options.run()
        if changes := differences(settings, run.settings):
            refuse(f"the data of {folder} changed since its training: {changes}")
        model = type(run.model).from_pretrained(folder).to(options.device)
        console.print(run.evaluate(model), soft_wrap=True)
