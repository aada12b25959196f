"""`mpnn eval`: measures a model that `mpnn train` saved, on the data that it was not trained on."""

from pathlib import Path
from typing import Annotated

import typer

from mpnn.cli.console import console, exit_on_invalid_input
from mpnn.cli.train import saved_run


def eval(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.", file_okay=False)],
) -> None:
    """Measure a model that mpnn train saved, on the held-out part of its data.

    The data must be where it was during training, and unchanged.
    \b
    Example:
      mpnn eval runs/train
    """
    with exit_on_invalid_input():
        run, model = saved_run(folder)
        console.print(run.evaluate(model), soft_wrap=True)
