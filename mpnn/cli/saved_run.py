"""A finished run of `mpnn train`, loaded from its folder."""

import json
from pathlib import Path

from mpnn.cli.options import Options
from mpnn.cli.tasks import Run
from mpnn.cli.train import FINISHED
from mpnn.models.saving import Model
from mpnn.train.checkpoint import differences


def load(folder: Path) -> tuple[Run, Model]:
    """The run, with its data, and its trained model."""
    path = folder / FINISHED
    if not path.is_file():
        raise ValueError(f"{folder} has no {FINISHED}: name a folder that mpnn train saved a finished run in")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        options, settings = Options.read(content["options"]), dict(content["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or of another version of mpnn ({error}); train the model again") from None
    run = options.run()
    if changes := differences(settings, run.settings):
        raise ValueError(f"the data of {folder} changed since its training: {changes}")
    return run, type(run.model).from_pretrained(folder).to(options.device)
