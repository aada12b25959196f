"""`mpnn data`: lists, finds and downloads datasets."""

from typing import Annotated

import typer
from rich.table import Table

from mpnn.cli.console import console, exit_on_invalid_input, memory
from mpnn.data import SOURCES, Source, locate
from mpnn.data.locate import find

BUILT_IN = {"digits": "comes with scikit-learn", "pydoc": "comes with Python"}

app = typer.Typer(
    help="Find or download datasets.", no_args_is_help=True, rich_markup_mode="rich", add_completion=False
)


@app.command("list")
def list_datasets() -> None:
    """List the datasets, and show which of them are on this machine.

    Example: mpnn data list
    """
    table = Table("name", "size", box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("where", overflow="fold")  # a truncated path would be useless
    for name, where in BUILT_IN.items():
        table.add_row(name, "", where)
    for name, source in SOURCES.items():
        folder = find(name)
        where = str(folder) if folder else "can be downloaded" if _size(source) else "must be unpacked by hand"
        size = memory(_size(source)) if _size(source) else ""
        table.add_row(name, size, where)
    console.print(table)


@app.command("get")
def get(name: Annotated[str, typer.Argument(help="A name from mpnn data list.")]) -> None:
    """Find a dataset on this machine or download it, check it, and print its folder.

    The command searches the folder of the environment variable MPNN_DATA,
    then the cache. Downloads go to the cache.
    \b
    Examples:
      mpnn data get cora
      MPNN_DATA=~/datasets mpnn data get tinyshakespeare
    """
    if name in BUILT_IN:
        console.print(f"{name}: {BUILT_IN[name]}; nothing to download")
        return
    with exit_on_invalid_input(), console.status(f"finding {name}"):
        folder = locate(name)
    source = SOURCES[name]
    console.print(str(folder), soft_wrap=True)
    console.print(f"{source.cite}\nlicense: {source.license}", style="dim", soft_wrap=True)


def _size(source: Source) -> int:
    return sum(file.size or 0 for file in source.files)
