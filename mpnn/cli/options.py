"""The options that decide which model is trained on what, each stated once, for `mpnn train` and `mpnn compare`.

`run.json` keeps them for `mpnn eval`.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
import typer

from mpnn import data
from mpnn.cli import tasks
from mpnn.cli.graph_run import OWN, Collection, GraphRun, GraphSettings
from mpnn.cli.link_run import LinkRun, LinkSettings
from mpnn.cli.tasks import Corpus, NodeRun, Nodes, NodeSettings, Run, TextRun, TextSettings, digest_of
from mpnn.data.columns import Missing
from mpnn.data.link_tables import Sets, link_tables
from mpnn.data.tables import EdgeFile, Problem, Repeats
from mpnn.graphs.tables import is_graph, named

S = TypeVar("S", TextSettings, NodeSettings, GraphSettings, LinkSettings)
EPOCHS = 200
Defaults = Mapping[str, Mapping[str, Any]]
"""The options of each task, with their defaults; None for one that has no default, or that depends on the data."""

_SHARED = {"graph": None, "seed": 0, "device": "cpu", "precision": "float32"}
_NODES = {**asdict(NodeSettings()), **_SHARED, "steps": EPOCHS}
FILES = dict.fromkeys(
    (
        *("nodes", "labels", "edges", "columns", "target", "weights", "directed", "first", "split", "ignore"),
        *("edge_features", "categories", "repeats", "missing", "scale", "encoding"),
    )
)
GRAPH_STEPS = 1000
LINK_STEPS = 200
_LINK_FILES = (
    *("edges", "columns", "relation", "time", "sets", "directed"),
    *("nodes", "dst_nodes", "ignore", "categories", "missing", "scale", "encoding"),
)
DEFAULTS: Defaults = {
    "text": {**asdict(TextSettings()), **_SHARED, "text": "pydoc", "file": None},
    "cora": _NODES,
    "digits": _NODES,
    "edges": {**_NODES, **FILES, "problem": "classes"},
    "graphs": {
        **asdict(GraphSettings()),
        **_SHARED,
        **FILES,
        "problem": "classes",
        "steps": GRAPH_STEPS,
        "graph_table": None,
    },
    "links": {
        **asdict(LinkSettings()),
        **{name: value for name, value in _SHARED.items() if name != "graph"},
        **dict.fromkeys(_LINK_FILES),
        "steps": LINK_STEPS,
    },
}
_OF_TASK = {"text": "text", "graphs": "graphs", "links": "links"}
# The options whose name is another than that of the field.
_NAMES = {"dst_nodes": "dst-nodes", "text": "data", "graph_table": "graph-table", "edge_features": "edge-features"}


Task = Literal["text", "cora", "digits", "links"]
TextName = Literal["pydoc", "tinyshakespeare"]
Arithmetic = Literal["float32", "bf16", "fp16"]
Readout = Literal["sum", "mean", "max"]
NodeModel = Literal["gat", "gatv2", "gcn", "sage", "gin", "transformer", "gnn", "lightgcn", "rgcn", "embeddings"]
Decoder = Literal["inner", "distmult", "complex"]


def _option(kind: Any, help: str, panel: str | None = None, metavar: str | None = None, **more: Any) -> Any:
    settings = {"help": help, "rich_help_panel": panel, "metavar": metavar, **more}
    return field(default=None, metadata={"kind": kind, "settings": settings})


_MODEL = "The model"
_STEPS = "The training"
_TEXT = "Text only"
_NODE = "Nodes and graphs only"
_OWN = "Graphs of your own"
_READ = "How tables are read"
_LINKS = "Links only"


@dataclass(frozen=True)
class Options:
    """Options of a training run. None stands for the default of the task, or for an option that the task lacks."""

    task: str | None = _option(
        Task,
        "What to learn: a GPT learns the characters of a text (text), a GAT classifies nodes (cora, digits), and links "
        "predicts the missing links of --edges (mpnn train only). Default: text, unless --nodes is given.",
    )
    graph: str | None = _option(
        str,
        "The graph: a topology (see mpnn graph --help), or cora (its citations) or knn(k) (edges from the k nodes with "
        "the nearest features), both with self-loops. Default: causal for text, cora for cora, knn(8) for digits; for "
        "tables the links of --edges, or knn(8) for nodes without --edges.",
        metavar="EXPR",
    )
    steps: int | None = _option(int, "Training steps (text, graphs, links) or epochs (nodes).", _STEPS)
    attention: str | None = _option(
        str,
        "dot, additive or linear; with --graph causal also retention, gated, state_space or delta.",
        _TEXT,
        metavar="NAME",
    )
    model: str | None = _option(
        NodeModel,
        "The network. For nodes and graphs, one of the first seven. For links, lightgcn, rgcn (the default with "
        "--relation) or embeddings, which passes no messages.",
        _NODE,
    )
    readout: str | None = _option(
        Readout,
        "How the states of nodes become those of a graph, with --graph-table. Default: sum for gin, else mean.",
        _NODE,
    )
    aggregate: str | None = _option(
        str,
        "How messages are combined: sum, mean, max, ... For nodes, only --model sage and gnn have this option.",
        _MODEL,
        metavar="NAME",
    )
    precision: str | None = _option(
        Arithmetic,
        "Arithmetic of the steps. bf16 and fp16 (GPUs only) are mixed precision: weights, optimizer and validation "
        "stay in float32.",
        _STEPS,
    )
    device: str | None = _option(str, "Device of the model, such as cpu or cuda.", _STEPS)
    seed: int | None = _option(int, "Random seed of weights and batches.", _STEPS)
    text: str | None = _option(TextName, "A built-in text: Python's manual (pydoc), or Shakespeare.", _TEXT)
    file: str | None = _option(Path, "Your own text file (UTF-8), instead of --data.", _TEXT, dir_okay=False)
    context: int | None = _option(int, "Number of characters that the model reads at a time.", _TEXT)
    dim: int | None = _option(
        int, "Width of the model. For nodes, the default is the width in the paper of --model.", _MODEL
    )
    heads: int | None = _option(int, "Attention heads; must divide --dim.", _MODEL)
    layers: int | None = _option(int, "Number of layers.", _MODEL)
    batch: int | None = _option(int, "Crops of text, graphs, or links, per step.", _STEPS)
    lr: float | None = _option(
        float,
        "Maximum learning rate; mpnn compare tries half and twice of it, too. The default is 0.01 for nodes, and 0.005 "
        "for cora and for --graph-table.",
        _STEPS,
    )
    dropout: float | None = _option(
        float,
        "Share of features and attention weights dropped in training. The default for nodes is 0.5, for cora 0.6, for "
        "digits 0.3.",
        _NODE,
    )
    fanouts: str | None = _option(
        str,
        "For many links: a step samples K in-neighbors of each node, with one K for each layer; -1 takes all. Default: "
        "a step computes all links.",
        _LINKS,
        metavar="K,K,...",
    )
    relation: str | None = _option(
        str, "The column of --edges with the types of links, as in a knowledge graph.", _LINKS, metavar="COLUMN"
    )
    time: str | None = _option(
        str,
        "The column of --edges with times: numbers, or dates such as 2026-11-28. The earliest links are for training, "
        "the last tenth for the test. Without --time, a column split (train, val, test) of --edges decides, or else "
        "chance.",
        _LINKS,
        metavar="COLUMN",
    )
    sets: str | None = _option(
        Sets,
        "Whether the columns of --edges name nodes of one set, or of two, such as users and items. Default: two, if no "
        "name is in both columns, or if names are numbers and the columns are called otherwise (user_id, item_id).",
        _LINKS,
    )
    decoder: str | None = _option(
        Decoder,
        "What scores a pair: inner (an inner product), distmult or complex (both with a vector for each relation). "
        "Default: inner; with --relation or --directed complex; for relations between two sets distmult.",
        _LINKS,
    )
    nodes: str | None = _option(
        Path,
        "Your own nodes: a table with a row of features for each node (.npy, Parquet, or text such as CSV and TSV). A "
        "column id names the nodes. Or a file with nodes and edges: GraphML, GEXF, GML, DOT, JSON.",
        _OWN,
        flags=("--nodes", "--features"),
        dir_okay=False,
    )
    dst_nodes: str | None = _option(
        Path,
        "The features of the second set of nodes, if there are two sets, such as users and items; --nodes then has "
        "those of the first set.",
        _LINKS,
        dir_okay=False,
    )
    graph_table: str | None = _option(
        Path,
        "A table with a row for each of many graphs, to learn something of each graph. Its column id names the graphs; "
        "--nodes and --edges then have a column graph.",
        _OWN,
        dir_okay=False,
    )
    labels: str | None = _option(
        Path,
        "A table with the columns to learn, if --nodes lacks them. Its rows have an id, or the order of --nodes.",
        _OWN,
        dir_okay=False,
    )
    target: str | None = _option(
        str,
        "The columns to learn, of --labels (default: all) or of --nodes. Empty cells are unknown.",
        _OWN,
        metavar="COLUMN,...",
    )
    problem: str | None = _option(
        Problem, "classes: names, or integers with -1 for unknown ones; multilabel: 0 or 1; regression: numbers.", _OWN
    )
    edges: str | None = _option(
        Path,
        "The links between the nodes: a table whose rows have two ids, or two node numbers from 0; or MatrixMarket.",
        _OWN,
        dir_okay=False,
    )
    columns: str | None = _option(
        str,
        "The source and the destination in --edges, by name or by number from 0, if there are more columns.",
        _READ,
        metavar="SRC,DST",
    )
    weights: str | None = _option(
        str, "The column of --edges with weights, which may be negative.", _OWN, metavar="COLUMN"
    )
    directed: bool | None = _option(
        bool, "Edges count only from source to destination. Default: in both directions.", _READ, flags=("--directed",)
    )
    first: int | None = _option(
        int, "The number of the first node in --edges, 0 or 1, where nodes have no ids.", _READ, min=0, max=1
    )
    split: str | None = _option(
        Path,
        "A table with a column split (train, val or test), or with train_mask, val_mask, test_mask (0 or 1), unless "
        "--nodes has them. Default: 60%, 20% and 20% of the labeled nodes, at random.",
        _READ,
        dir_okay=False,
    )
    ignore: str | None = _option(str, "Columns of --nodes that are not features.", _READ, metavar="COLUMN,...")
    edge_features: str | None = _option(
        str,
        "Columns of --edges that are features, for gat, gatv2, gin and transformer.",
        _READ,
        metavar="COLUMN,...",
    )
    repeats: str | None = _option(
        Repeats,
        "If several rows of --edges link the same two nodes: first keeps the first row; sum adds up their weights and "
        "features (without either, the weight of an edge is the number of its rows); refuse, the default, refuses rows "
        "that differ, and counts equal rows once.",
        _READ,
    )
    categories: str | None = _option(
        str,
        "Features that are categories: words, or whole numbers that only name something, such as an element. Each "
        "value in rows for training becomes a column of ones and zeros.",
        _READ,
        metavar="COLUMN,...",
    )
    missing: str | None = _option(
        Missing,
        "What to do with empty cells in features: refuse, the default, stops with an error; mean fills them with the "
        "mean over rows for training, and those of a category with the share of each value; indicator also does this, "
        "and adds a column that says where cells were empty.",
        _READ,
    )
    scale: bool | None = _option(
        bool,
        "Subtract from numbers and dates their mean over rows for training, and divide by their standard deviation.",
        _READ,
        flags=("--scale",),
    )
    encoding: str | None = _option(
        str, "The encoding of text files, such as latin-1 or cp1252. Default: UTF-8.", _READ, metavar="NAME"
    )

    @staticmethod
    def read(written: Any) -> "Options":
        """The options in a file that `asdict` of others was written to."""
        names = {field.name for field in fields(Options)}
        if not isinstance(written, Mapping) or set(written) != names:
            raise ValueError(f"expected the options {', '.join(sorted(names))}")
        return Options(**written)

    def resolved(self, defaults: Defaults = DEFAULTS, task: str | None = None) -> "Options":
        """The options with the defaults of their task, or of `task`."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        known = {"task"} if task is None else set()
        if self.task is not None and self.task not in defaults:
            raise ValueError(f"--task {self.task} is one of mpnn train; mpnn compare has {_those(defaults)}")
        own = "graphs" if "graph_table" in given else "edges" if given.keys() & FILES.keys() else "text"
        task = task or self.task or own
        for name in (name for name in given if name not in known | defaults[task].keys()):
            whose = [_described(other) for other in defaults if name in defaults[other]]
            raise ValueError(
                f"--{_NAMES.get(name, name)} does not apply to {_described(task)}, only to {', '.join(whose)}"
            )
        if self.file is not None and self.text is not None:
            raise ValueError("--file is the text to train on, and --data names another; leave one of them out")
        for name in ("context", "dim", "heads", "layers", "batch", "lr", "steps"):
            if not 0 < given.get(name, 1) < math.inf:
                raise ValueError(f"--{name} must be more than 0; got {given[name]}")
        if not 0 <= given.get("dropout", 0) < 1:
            raise ValueError(f"--dropout must be at least 0 and less than 1; got {self.dropout}")
        full = {**defaults[task], **given, "task": task}
        if self.file is not None:
            full["text"] = None
        if full.get("precision") == "float32":
            full["precision"] = "no"  # as training loops name it
        return replace(self, **full)

    def run(self) -> Run:
        """The run, before its first step."""
        options: Any = self.resolved()
        if not -(2**63) <= options.seed < 2**63:
            raise ValueError(f"--seed must fit into 64 bits; got {options.seed}")
        if options.graph is not None and not options.graph.strip():
            raise ValueError('--graph is empty; name a topology, such as "causal & window(16)", or leave --graph out')
        _check_device(options.device)
        if options.precision == "fp16" and options.device == "cpu":
            raise ValueError("--precision fp16 needs a GPU: torch computes it on GPUs only; use bf16, or --device cuda")
        if options.task == "text":
            return TextRun(
                options.graph or "causal",
                options.corpus(),
                options.settings(TextSettings),
                options.seed,
                options.device,
            )
        if options.task == "links":
            return options.link_run()
        if options.task == "graphs":
            if self.edges is None and options.graph is None:
                raise ValueError("graphs of your own need --edges, or --graph such as complete for every pair of nodes")
            return GraphRun(
                options.graph or OWN,
                options.load_graphs(),
                options.steps,
                options.seed,
                options.settings(GraphSettings),
                device=options.device,
                precision=options.precision,
            )
        nodes = options.load_nodes()
        return NodeRun(
            options.graph or nodes.own_graph,
            nodes,
            options.steps,
            options.seed,
            options.settings(NodeSettings),
            device=options.device,
            precision=options.precision,
        )

    def arguments(self) -> str:
        """The arguments with which `mpnn train` has these resolved options, without those that are its defaults. The
        data come first, the learning rate last."""
        task = str(self.task)
        chosen = {one.name: getattr(self, one.name) for one in fields(self) if one.name in DEFAULTS[task]}
        known = DEFAULTS[task]
        written = [f"--task {task}"] if task in get_args(Task) and task != "text" else []
        of_data = [name for name in chosen if name in FILES or name in ("text", "file", "graph_table")]
        of_model = [name for name in chosen if name not in of_data and name != "lr"]
        for name in (*of_data, *of_model, "lr"):
            value = chosen[name]
            if value is not None and value is not False and value != known[name]:
                written.append(_flag(name) + _written(value))
        return " ".join(written)

    def settings(self, kind: type[S]) -> S:
        """The settings of a model in resolved options, of this class."""
        values = {one.name: getattr(self, one.name) for one in fields(kind)}
        return kind(**{name: value for name, value in values.items() if value is not None})

    def load_nodes(self) -> Nodes:
        """The nodes, of resolved options. Raises ValueError or OSError if the files cannot be read."""
        if self.task != "edges":
            return Nodes.cora() if self.task == "cora" else Nodes.digits()
        if self.nodes is None or (self.labels is None and self.target is None):
            raise ValueError(
                "a graph of your own needs --nodes with --target or --labels, and --edges unless --graph makes them"
            )
        return Nodes.of_files(Path(self.nodes), self.edge_file(), self.seed or 0, **self._tables())

    def load_graphs(self) -> Collection:
        """The graphs, of resolved options. Raises ValueError or OSError if the files cannot be read."""
        if self.graph_table is None or self.nodes is None or (self.labels is None and self.target is None):
            raise ValueError("graphs of your own need --graph-table, --nodes, and --target or --labels")
        paths = Path(self.graph_table), Path(self.nodes)
        return Collection.of_files(*paths, self.edge_file(), self.seed or 0, **self._tables())

    def link_run(self) -> LinkRun:
        """The run on links, of resolved options. Raises ValueError or OSError if the files cannot be read."""
        if self.edges is None:
            raise ValueError("links need --edges, a table with a row for each link")
        edges = Path(self.edges)
        nodes, dst_nodes = (None if name is None else Path(name) for name in (self.nodes, self.dst_nodes))
        file = EdgeFile(edges, named(self.columns), directed=bool(self.directed))
        read: dict[str, Any] = {name: getattr(self, name) for name in ("relation", "time", "sets", "encoding")}
        read |= {"missing": self.missing or "refuse", "scale": bool(self.scale)}
        read |= {name: _listed(getattr(self, name)) or () for name in ("ignore", "categories")}
        options: Any = self
        of_nodes: dict[str, Any] = {"nodes": nodes, "dst_nodes": dst_nodes}
        tables = link_tables(edges, columns=file.columns, directed=file.directed, seed=options.seed, **of_nodes, **read)
        return LinkRun(
            tables,
            options.steps,
            options.seed,
            self.settings(LinkSettings),
            digest=digest_of([path for path in (nodes, dst_nodes) if path is not None], file, read),
            device=options.device,
            precision=options.precision,
        )

    def _tables(self) -> dict[str, Any]:
        return {
            "labels": self.labels and Path(self.labels),
            "target": _listed(self.target),
            "problem": self.problem,
            "split": self.split and Path(self.split),
            "ignore": _listed(self.ignore) or (),
            "categories": _listed(self.categories) or (),
            "missing": self.missing or "refuse",
            "scale": bool(self.scale),
            "encoding": self.encoding,
        }

    def edge_file(self) -> EdgeFile | None:
        """The table of edges, which the file of nodes is if it holds a graph; None if there is none, which --columns,
        --weights, --directed and --repeats need."""
        path = self.edges
        if path is None and self.nodes is not None and Path(self.nodes).is_file():
            path = self.nodes if is_graph(Path(self.nodes), self.encoding) else None
        if path is None:
            for name in ("columns", "weights", "directed", "first", "edge_features", "repeats"):
                if getattr(self, name) is not None and getattr(self, name) is not False:
                    raise ValueError(f"--{_NAMES.get(name, name)} is about --edges, which is missing")
            return None
        features = tuple(_listed(self.edge_features) or ())
        columns = named(self.columns)
        repeats: Any = self.repeats or "refuse"
        return EdgeFile(Path(path), columns, self.weights, bool(self.directed), self.first, features, repeats)

    def corpus(self) -> Corpus:
        """The text, of resolved options. Raises ValueError or OSError if the file cannot be read."""
        context = self.settings(TextSettings).context
        if self.file is not None:
            file = Path(self.file)
            try:
                return Corpus.of(file.name, file.read_text(encoding="utf-8"), context)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from None
        content = data.tinyshakespeare() if self.text == "tinyshakespeare" else tasks.manual()
        return Corpus.of(str(self.text), content, context)


def takes(defaults: Defaults, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces the first parameter of a command, `options: Options`, by the fields of these names (all by default).
    Its help shows these defaults."""
    chosen = [one for one in fields(Options) if not names or one.name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**given: Any) -> None:
            command(Options(**{one.name: _plain(given.pop(one.name)) for one in chosen}), **given)

        own = [*inspect.signature(command, eval_str=True).parameters.values()][1:]
        added = [own[0].replace(name=one.name, default=None, annotation=_typed(one, defaults)) for one in chosen]
        vars(called)["__signature__"] = inspect.Signature([*added, *own])
        del vars(called)["__wrapped__"]
        called.__annotations__ = {}  # Typer reads the signature alone
        return called

    return decorate


def _typed(one: Field[Any], defaults: Defaults) -> Any:
    """The annotation that Typer reads."""
    by_value: dict[Any, list[str]] = {}
    for task, values in defaults.items():
        if values.get(one.name) is not None:
            by_value.setdefault(values[one.name], []).append(_OF_TASK.get(task, "nodes"))
    shown = [f"{value} for {' and '.join(dict.fromkeys(whose))}" for value, whose in by_value.items()]
    default = next(iter(by_value)) if len(by_value) == 1 else "; ".join(shown)
    settings = {**one.metadata["settings"]}
    flags = settings.pop("flags", (f"--{_NAMES.get(one.name, one.name)}",))
    option = typer.Option(*flags, show_default=str(default) if shown else False, **settings)
    optional = one.metadata["kind"] | None
    return Annotated[optional, option]


def _flag(name: str) -> str:
    """The option of a field, as people type it."""
    settings = next(one for one in fields(Options) if one.name == name).metadata["settings"]
    return str(settings.get("flags", (f"--{_NAMES.get(name, name)}",))[0])


def _written(value: Any) -> str:
    """Returns the text of an option for this value: nothing for True."""
    if value is True:
        return ""
    text = quote(str(value))
    return f' "{value}"' if text == f"'{value}'" and not set('"$`\\!') & set(text) else f" {text}"


def _plain(value: Any) -> Any:
    """Numbers and text, as JSON can hold them. Files are named from the root."""
    return str(value.absolute()) if isinstance(value, Path) else value


def _those(tasks: Iterable[str]) -> str:
    return ", ".join(task for task in tasks if task in get_args(Task))


def _described(task: str) -> str:
    own = {"edges": "a graph of your own (--nodes)", "graphs": "graphs of your own (--graph-table)"}
    return {**own, "hf": "--hf"}.get(task, f"--task {task}")


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]


def _check_device(name: str | None) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an AssertionError if torch was compiled without CUDA
        why = str(error).splitlines()[0]
        raise ValueError(f"there is no device {name!r} here ({why}); use --device cpu") from None
