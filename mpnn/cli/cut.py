"""`mpnn graph cut`: a graph on the disk becomes the parts of ranks, which `mpnn.distributed.Part.open` maps."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from mpnn.cli.console import console, exit_on_invalid_input, refuse
from mpnn.distributed import disk
from mpnn.graphs import open_csr


def cut(
    graph: Annotated[Path, typer.Argument(help="A folder of mpnn graph convert.")],
    folder: Annotated[Path, typer.Argument(help="The folder to create, or one of the same cut to complete.")],
    ranks: Annotated[int, typer.Option("--ranks", help="The number of processes.", min=1)],
    owners: Annotated[
        Path | None,
        typer.Option(help="A file with the rank of each node, as METIS writes it. Default: by neighbors, in one pass."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE.npy", help="Rows of nodes, edge_attr or edge_type; repeat it for more."),
    ] = None,
) -> None:
    """Divide a graph on the disk, so that each process of a training maps its own part.

    No process holds the whole graph: memory is about 16 bytes a node. A cut that was killed continues with the same
    command. edge_attr and edge_type are in the order of the edges, and need [bold]mpnn graph convert --edge-ids[/bold].

    Examples:
    \b
      mpnn graph convert edges.csv papers
      mpnn graph cut papers parts --ranks 4 --data features=x.npy --data labels=y.npy
      gpmetis papers.metis 4 && mpnn graph cut papers parts --ranks 4 --owners papers.metis.part.4
    """
    with exit_on_invalid_input():
        named = dict(option.partition("=")[::2] for option in data or [])
        for name, file in named.items():
            if not file.endswith(".npy") or not Path(file).is_file():
                refuse(f"--data takes NAME=FILE.npy, a file that exists; got {name}={file}")
        whole = open_csr(graph)
        with console.status("assigning nodes"):
            of_node = disk.ldg(whole, ranks) if owners is None else disk.read_owners(owners)
        arrays = {name: np.load(file, mmap_mode="r") for name, file in named.items()}
        with console.status("writing parts"):
            fetched = disk.cut(whole, folder, of_node, ranks, data=arrays)
    console.print(f"{whole.num_edges:,} edges over {ranks} ranks in {folder}", soft_wrap=True, markup=False)
    console.print(f"the busiest rank fetches {max(fetched):,} of {whole.num_dst:,} nodes in a layer", soft_wrap=True)
    console.print(f'mpnn.distributed.Part.open("{folder}") opens that of a process', soft_wrap=True, markup=False)
