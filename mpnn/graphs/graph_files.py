"""Reads graphs from files of GraphML, GEXF, GML, DOT and JSON through networkx, as a table of nodes or one of edges.

A format is recognized by the first characters of a file. What networkx would leave out without a word is refused:
subgraphs of DOT, and edges of nodes that a file does not list.
"""

import contextlib
import inspect
import io
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpnn.graph.registry import install
from mpnn.graphs.table import ID, Table, as_text

_XML = re.compile(r"\s*<")
_FORMATS = {
    "GraphML": re.compile(r"\s*<(?s:.*?)<graphml\b|\s*<graphml\b"),
    "GEXF": re.compile(r"\s*<(?s:.*?)<gexf\b|\s*<gexf\b"),
    "GML": re.compile(r'(\s*(#[^\n]*|[A-Za-z]+[ \t]+("[^"]*"|[\d.]+)))*\s*graph\s*\['),
    "DOT": re.compile(r"(\s*(//[^\n]*|#[^\n]*|/\*(?s:.*?)\*/))*\s*(strict\s+)?(di)?graph\b[^\n,;\[]*\{", re.IGNORECASE),
    "JSON": re.compile(r'\s*(\{\s*["}]|\[\s*[\[{\]])'),
}
_NODE_OF_XML = re.compile(r"<node[\s>/]")


def format_of(path: Path, head: str) -> str | None:
    """The name of the format of a graph, which the first characters of a file say; None of others.

    Raises:
        ValueError: the file is XML, and no graph.
    """
    for name, begins in _FORMATS.items():
        if begins.match(head):
            return name
    if _XML.match(head):
        raise ValueError(f"{path} is XML, and neither GraphML nor GEXF")
    return None


def table_of_graph(path: Path, text: str, form: str, of_edges: bool) -> Table:
    """The nodes of a graph in this format, with their attributes as columns after `id`; or its edges, with their
    attributes after `source` and `target`.

    Raises:
        ValueError: the text is not in this format, or holds what cannot be read.
        ImportError: networkx is missing, or pydot for DOT.
    """
    graph = _graph(path, text, form)
    kind = f"{form}, {'directed' if graph.is_directed() else 'undirected'}"
    if of_edges:
        edges = [*graph.edges(data=True)]
        ends = {"source": [_name(u) for u, _, _ in edges], "target": [_name(v) for _, v, _ in edges]}
        return _table(path, ends, [data for *_, data in edges], kind, is_directed=graph.is_directed())
    nodes = [*graph.nodes(data=True)]
    names = [_name(node) for node, _ in nodes]
    attributes = [data for _, data in nodes]
    if [data.get("label") for data in attributes] == names:  # GEXF repeats names as labels
        attributes = [{name: value for name, value in data.items() if name != "label"} for data in attributes]
    return _table(path, {ID: names}, attributes, kind)


def _table(
    path: Path, first: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, Any]], form: str, **more: Any
) -> Table:
    import pyarrow

    names = [*dict.fromkeys(name for row in rows for name in row)]
    values = {name: [row.get(name) for row in rows] for name in names}
    lists = [name for name, cells in values.items() if any(isinstance(cell, (list, dict, tuple)) for cell in cells)]
    columns = {name: pyarrow.array(cells, pyarrow.string()) for name, cells in first.items()}
    if twice := [name for name in names if name in columns]:
        raise ValueError(f"{path} has an attribute named {twice[0]!r}, as its {', '.join(first)}; rename it")
    columns |= {name: _column(cells) for name, cells in values.items() if name not in lists}
    about = f"{form}, left out as they are no single values: {', '.join(lists)}" if lists else form
    if not rows and not more:
        raise ValueError(f"{path} has no nodes")
    return Table(path, [*columns], len(rows), columns.__getitem__, about, has_ends=bool(more), **more)


def _column(cells: Sequence[Any]) -> Any:
    """Values as Arrow's: numbers, true and false, or text where they are mixed."""
    import pyarrow

    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds <= {int, float} and kinds:
        with contextlib.suppress(OverflowError, pyarrow.ArrowInvalid):
            return pyarrow.array(cells, "float64" if float in kinds else "int64")
    if kinds == {bool}:
        return pyarrow.array(cells, "bool")
    return pyarrow.array([None if cell is None else as_text(cell) for cell in cells], pyarrow.string())


def _name(node: Any) -> str:
    return as_text(node)


def _graph(path: Path, text: str, form: str) -> Any:
    try:
        import networkx
    except ImportError:
        raise ImportError(f"reading {path.name}, {form}, needs networkx: {install('files')}") from None
    read = {"GraphML": _graphml, "GEXF": _gexf, "GML": _gml, "DOT": _dot, "JSON": _json}[form]
    try:
        graph = read(networkx, text)
    except ImportError:
        raise ImportError(f"reading {path.name}, DOT, needs pydot: {install('files')}") from None
    except Exception as error:  # parsers of networkx raise many kinds
        raise ValueError(f"{path} begins as {form}, and networkx cannot read it: {error}") from None
    return graph


def _graphml(networkx: Any, text: str) -> Any:
    text = _plain_xml(text)
    return _as_listed(networkx.parse_graphml(text), len(_NODE_OF_XML.findall(text)))


def _gexf(networkx: Any, text: str) -> Any:
    text = _plain_xml(text)
    return _as_listed(networkx.read_gexf(io.BytesIO(text.encode())), len(_NODE_OF_XML.findall(text)))


def _plain_xml(text: str) -> str:
    """XML without its declaration, which names the encoding that the file had, and without comments."""
    return re.sub(r"<\?xml.*?\?>|<!--.*?-->", "", text, flags=re.DOTALL).strip()


def _as_listed(graph: Any, count: int) -> Any:
    """The graph, unless an edge brought in nodes that the file does not list."""
    if len(graph) != count:
        raise ValueError(f"it lists {count} nodes, and edges have ends among {len(graph)}")
    return graph


def _gml(networkx: Any, text: str) -> Any:
    lines = text.encode("ascii", "xmlcharrefreplace").decode().splitlines()
    is_labeled = re.search(r"\bnode\s*\[[^\[\]]*\blabel\b", text) is not None
    return networkx.parse_gml(lines, label="label" if is_labeled else "id")


def _json(networkx: Any, text: str) -> Any:
    data = json.loads(text)
    edges = next((name for name in ("links", "edges") if isinstance(data, dict) and name in data), None)
    if edges is None or "nodes" not in data:
        raise ValueError('a graph in JSON has "nodes" and "links" (or "edges"), as networkx.node_link_data writes it')
    takes_edges = "edges" in inspect.signature(networkx.node_link_graph).parameters
    graph = networkx.node_link_graph(data, **({"edges": edges} if takes_edges else {"link": edges}))
    return _as_listed(graph, len(data["nodes"]))


def _dot(networkx: Any, text: str) -> Any:
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said):  # where pydot writes what is wrong
        warnings.simplefilter("ignore", DeprecationWarning)  # of pyparsing, which pydot calls by old names
        import pydot

        graphs = pydot.graph_from_dot_data(text)
        if not graphs:
            raise ValueError(" ".join(said.getvalue().split()) or "pydot does not read it")
        if graphs[0].get_subgraphs():
            raise ValueError("it has subgraphs, which networkx leaves out; write their nodes and edges outside of them")
        graph = networkx.nx_pydot.from_pydot(graphs[0])
    _unquote(data for _, data in graph.nodes(data=True))
    _unquote(data for *_, data in graph.edges(data=True))
    return graph


def _unquote(attributes: Iterable[dict[str, Any]]) -> None:
    """Takes away the quotes around values, which pydot keeps."""
    for data in attributes:
        for name, value in data.items():
            if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
                data[name] = value[1:-1].replace('\\"', '"')
