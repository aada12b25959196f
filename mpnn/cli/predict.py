"""`mpnn predict`: what a model that `mpnn train` saved says about nodes, graphs or pairs of nodes, as a table."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from mpnn.cli.console import Force, check_file, console, exit_on_failure, exit_on_invalid_input
from mpnn.cli.graph_run import OWN, Collection, GraphRun, has_loops, predictions
from mpnn.cli.link_run import LinkRun, scored_pairs
from mpnn.cli.options import Options
from mpnn.cli.tasks import NODE_MODELS, NODES, NodeRun, graph_over, say_how_read
from mpnn.cli.train import saved_options, saved_run
from mpnn.data.columns import Column
from mpnn.data.graph_tables import graph_inputs
from mpnn.data.link_tables import read_pairs
from mpnn.data.tables import Outputs, node_inputs
from mpnn.graph.files import write_atomically
from mpnn.graphs.tables import is_graph
from mpnn.models import GIN, GraphPredictor, LinkRanker

_NAME_EDGES = "name the edges of its nodes with --edges, a file with a header alone if they have none"


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", file_okay=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The table to write.")] = Path("predictions.csv"),
    nodes: Annotated[
        Path | None, typer.Option(help="Other nodes, with the same columns of features. Their targets are not read.")
    ] = None,
    edges: Annotated[
        Path | None,
        typer.Option(
            help="The edges of the nodes in --nodes. Default: the run's edges, if the nodes are those of the run."
        ),
    ] = None,
    graph_table: Annotated[
        Path | None,
        typer.Option(help="Other graphs, for a run with --graph-table. Also pass their --nodes and --edges."),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="Pairs to score, for a run with --task links: a table with the columns of --edges, without times."
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(help="The encoding of these files. Default: the one in the run's options.", metavar="NAME"),
    ] = None,
    force: Force = False,
) -> None:
    """Write the predictions of a model of nodes, graphs or links, which mpnn train saved, to a table.

    For nodes and graphs, the table has a row for each: its id (or its number
    from 0), then the most likely class and the probability of each class; for
    several labels, 0 or 1 for each label and their probabilities; for
    regression, the numbers.

    For links, the table has a row for each pair in --pairs: its nodes (and
    relation), the score, and p, the probability of a link if half of all pairs
    are links. The column rank is the rank of the second node among all nodes
    without a known link to the first (1 is the best). The column known holds
    train, val or test if the pair is a link of the run, and is empty otherwise.
    As in mpnn eval, messages pass only along the links for training.
    \b
    Examples:
      mpnn predict runs/train -o predictions.csv
      mpnn predict runs/train --nodes new.csv --edges new_edges.csv -o new_predictions.csv
      mpnn predict runs/train --graph-table new.csv --nodes new_atoms.csv --edges new_bonds.csv
      mpnn predict runs/films --pairs pairs.csv -o scores.csv
    """
    with exit_on_invalid_input():
        check_file(out, (".csv",), "predictions are a table of text", force)
        options, settings = saved_options(folder)
        encoding = encoding or options.encoding
        if (options.task == "links") != (pairs is not None):
            raise ValueError(
                f"{folder} has a model of links: name the --pairs to score"
                if pairs is None
                else f"{folder} was trained without --task links; --pairs are for links"
            )
        if pairs is None:
            rows = [*_rows(*_predicted(folder, options, settings, nodes, edges, graph_table, encoding))]
        elif nodes is not None or edges is not None or graph_table is not None:
            raise ValueError(f"{folder} scores --pairs of its own nodes; leave --nodes, --edges and --graph-table out")
        else:
            rows = [*_of_links(folder, options, pairs, encoding)]
    with exit_on_failure():
        write_atomically(out, lambda path: _write(path, rows))
    console.print(f"{len(rows) - 1:,} predictions in {out}", soft_wrap=True)


def _of_links(folder: Path, options: Options, pairs: Path, encoding: str | None) -> Iterator[list[str]]:
    """The header and the rows of a table of scored pairs."""
    run, model = saved_run(folder)
    assert isinstance(run, LinkRun)
    assert isinstance(model, LinkRanker)
    return scored_pairs(run, model, read_pairs(pairs, run.tables, Path(str(options.edges)), encoding))


def _predicted(
    folder: Path,
    options: Options,
    settings: dict[str, Any],
    nodes: Path | None,
    edges: Path | None,
    graph_table: Path | None,
    encoding: str | None,
) -> tuple[Sequence[str], Outputs, Tensor]:
    """The names of the nodes, what outputs mean, and the outputs [N, C]."""
    if options.task == "text":
        raise ValueError(f"{folder} has a model of text; mpnn generate continues text")
    saved = _saved_names(folder)
    if options.task == "graphs":
        names, outputs = _of_graphs(folder, options, saved, encoding, graph_table, nodes, edges)
        return names, saved["outputs"], outputs
    if graph_table is not None:
        raise ValueError(f"{folder} was trained without --graph-table")
    over_edges = str(settings["graph"]).strip() == "edges"
    if over_edges and edges is None and nodes is not None and is_graph(nodes, encoding):
        edges = nodes
    if edges is None and (nodes is None or (over_edges and options.nodes is not None)):
        run, model = saved_run(folder)
        assert isinstance(run, NodeRun)
        x = run.nodes.data.x
        graph = run.graph
        ids = saved["ids"]
        x = x if nodes is None else _own(nodes, saved, folder, encoding).to(x.device)
    else:
        if options.nodes is None or (edges is not None and options.edge_file() is None):
            raise ValueError(f"{folder} was trained without {'--nodes' if options.nodes is None else '--edges'}")
        changed = replace(options, edges=options.edges if edges is None else str(edges))
        linked = changed.edge_file() if over_edges else None
        inputs = node_inputs(nodes or Path(options.nodes), linked, saved["columns"], encoding)
        say_how_read(inputs.understood)
        device = str(options.device)
        model = NODE_MODELS[str(options.model)].from_pretrained(folder).to(device)
        graph = graph_over(inputs, "edges", settings["graph"]).to(device)
        x = inputs.x.to(device)
        ids = inputs.ids
    with torch.no_grad():
        values = model.eval()(x, graph).cpu()
    return ids or [*map(str, range(len(values)))], saved["outputs"], values


def _of_graphs(
    folder: Path, options: Options, saved: dict[str, Any], encoding: str | None, *files: Path | None
) -> tuple[Sequence[str], Tensor]:
    """The names of graphs, in `files` (graphs, nodes, edges) or of the run, and the outputs [G, C]."""
    own = options.edges is not None
    wanted = files if own else files[:2]
    if any(file is not None for file in files) and not (all(wanted) and (own or files[2] is None)):
        options_of = "--graph-table, --nodes and --edges" if own else "--graph-table and --nodes, without --edges"
        raise ValueError(f"{folder} needs {options_of} for other graphs, and none of them for its own")
    if files[0] is None:
        run, model = saved_run(folder)
        assert isinstance(run, GraphRun)
        graphs = run.graphs
    else:
        changed = replace(options, edges=str(files[2]) if own else None)
        tables = [Path(str(file)) for file in files[:2]]
        graphs = Collection.of(graph_inputs(tables[0], tables[1], changed.edge_file(), saved["columns"], encoding))
        say_how_read(graphs.data.understood)
        kind = GIN if options.model == "gin" else GraphPredictor
        model = kind.from_pretrained(folder).to(str(options.device))
    assert graphs.data.ids is not None
    every = torch.arange(len(graphs))
    values = predictions(model, graphs, every, options.graph or OWN, has_loops(options.model))
    return graphs.data.ids, values


def _own(nodes: Path, saved: dict[str, Any], folder: Path, encoding: str | None) -> Tensor:
    """The features in a table of the nodes of the run, in their order. Other nodes are refused."""
    inputs = node_inputs(nodes, None, saved["columns"], encoding)
    say_how_read(inputs.understood)
    if inputs.ids is None or saved["ids"] is None:
        raise ValueError(f"{nodes} may have other nodes than {folder}, without ids; {_NAME_EDGES}")
    row = {name: k for k, name in enumerate(inputs.ids)}
    if other := row.keys() ^ {*saved["ids"]}:
        new = sorted(other & row.keys())
        what = f"has the node {new[0]!r}, which is new to" if new else f"lacks the node {min(other)!r} of"
        raise ValueError(f"{nodes} {what} {folder}; {_NAME_EDGES}")
    return inputs.x[[row[name] for name in saved["ids"]]]


def _saved_names(folder: Path) -> dict[str, Any]:
    """Returns the content of the file that `mpnn.cli.tasks.Nodes.save` wrote."""
    path = folder / NODES
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        columns = {table: {n: Column(**one) for n, one in of.items()} for table, of in saved["columns"].items()}
        return {"ids": saved["ids"], "columns": columns, "outputs": Outputs(**saved["outputs"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or of another version of mpnn ({error}); train the model again") from None


def _rows(ids: Sequence[str], outputs: Outputs, values: Tensor) -> Iterator[list[Any]]:
    """The header and the rows of the table."""
    names = outputs.names
    if outputs.problem == "regression":
        yield ["id", *names]
        std, mean = (torch.tensor(x, dtype=torch.float64) for x in (outputs.std, outputs.mean))
        yield from ([name, *_written(row, 9)] for name, row in zip(ids, values * std + mean, strict=True))
        return
    several = outputs.problem == "multilabel"
    yield ["id", *(names if several else ["class"]), *(f"p_{name}" for name in names)]
    for name, row in zip(ids, values.sigmoid() if several else values.softmax(-1), strict=True):
        yield [name, *((row > 0.5).int().tolist() if several else [names[int(row.argmax())]]), *_written(row)]


def _written(numbers: Tensor, digits: int = 6) -> list[str]:
    return [f"{number:.{digits}g}" for number in numbers.tolist()]


def _write(path: Path, rows: Iterable[list[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
