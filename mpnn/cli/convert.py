"""`mpnn graph convert`: an edge list of any size becomes a folder that `graphs.open_csr` maps."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mpnn.cli.console import console, exit_on_invalid_input, refuse
from mpnn.graphs import write_csr
from mpnn.graphs.tables import named


def convert(
    edges: Annotated[Path, typer.Argument(help="A file of edges: .npy, Parquet, or text such as .csv.")],
    folder: Annotated[Path, typer.Argument(help="The folder to create.")],
    n: Annotated[
        int | None, typer.Option("--n", help="Number of nodes (destinations). Default: the largest index plus 1.")
    ] = None,
    num_src: Annotated[
        int | None, typer.Option("--num-src", help="Number of sources, if they are other nodes; needs --n.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="SRC,DST",
            help="The columns of sources and destinations, by name or by number from 0, if there are more.",
        ),
    ] = None,
    first: Annotated[
        int | None, typer.Option("--first", help="The number of the first node in the file: 0 or 1.", min=0, max=1)
    ] = None,
    names: Annotated[
        Literal["one", "two"] | None,
        typer.Option(
            "--names",
            help="The ends are names: of one set of nodes, or of two, sources and destinations. They are numbered as "
            "they first appear, and written next to the graph.",
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option("--encoding", help="The encoding of text. Default: UTF-8.", metavar="NAME")
    ] = None,
    edge_ids: Annotated[
        bool, typer.Option("--edge-ids", help="Also store the index of each edge in the file.")
    ] = False,
    memory: Annotated[float, typer.Option("--memory", help="GB that sorting may take.", min=0.001)] = 1.0,
) -> None:
    """Write a file of edges to a folder for [bold]graphs.open_csr[/bold], in bounded memory.

    Text has one edge a line: source and destination, separated by commas, semicolons, tabs or blanks. Comments begin
    with #, and a line of names may come first. An array in .npy has the shape [2, E] or [E, 2]. MatrixMarket and the
    edges of GraphML, GEXF, GML, DOT and JSON are recognized by their content.

    Sorting needs 8 bytes of disk an edge (16 with --edge-ids) in addition to the result, which takes 4 an edge and 8 a
    node.

    Examples:
    \b
      mpnn graph convert edges.csv papers
      mpnn graph convert clicks.parquet clicks --n 50000 --num-src 1000000 --columns user,page
      mpnn graph convert follows.csv follows --names one
    """
    with exit_on_invalid_input():
        if not edges.is_file():
            refuse(f"there is no file {edges}")
        if num_src is not None and n is None:
            refuse("--num-src needs --n, the number of destinations")
        sizes = {"num_nodes": n} if num_src is None else {"num_dst": n, "num_src": num_src}
        with console.status("sorting"):
            graph = write_csr(
                folder,
                edges,
                **sizes,
                columns=named(columns),
                first=first,
                encoding=encoding,
                names=names,
                edge_ids=edge_ids,
                memory=int(memory * 1e9),
            )
    nodes = f"{graph.num_dst:,} nodes"
    if graph.num_src != graph.num_dst:
        nodes = f"{graph.num_dst:,} destinations, {graph.num_src:,} sources"
    console.print(
        f"{nodes}, {graph.num_edges:,} edges: {graph.nbytes:,} bytes in {folder}", soft_wrap=True, markup=False
    )
    if names is not None:
        console.print(f"the names of the nodes are in {folder / 'names.json'}", soft_wrap=True, markup=False)
    console.print(f'mpnn.graphs.open_csr("{folder}") opens it', soft_wrap=True, markup=False)
