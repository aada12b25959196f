"""Training runs of the command line on text and on nodes, and the table of their results."""

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import torch
from rich.markup import escape
from rich.progress import Progress as Bars, TaskID
from rich.table import Table
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mpnn import Graph, MessagePassing, data
from mpnn.cli import console, side_by_side
from mpnn.cli.measure import backends, bytes_for_backward
from mpnn.cli.stop import stop_between_steps
from mpnn.data.tables import EdgeFile, NodeInputs, Outputs
from mpnn.graph.files import write_atomically
from mpnn.graph.registry import unknown
from mpnn.graphs import from_edges, knn, parse
from mpnn.models import GAT, GCN, GIN, GNN, GPT, GATv2, GraphSAGE, GraphTransformer
from mpnn.models.saving import Model
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.language_model import adamw, fit_language_model, language_model_loss
from mpnn.train.loop import History, Precision, Progress
from mpnn.train.node_classifier import fit_node_classifier, node_loss, node_score, node_scores

_VALIDATION = 0.1
_VALIDATIONS = 10
_CROPS = 64  # of the validation text that `mpnn compare` reads at a time: some four steps of training
_WEIGHT_DECAY = 5e-4  # of the GAT and GCN papers
CHARACTERS = "characters.txt"
NODES = "nodes.json"
MEASURES = {"classes": "accuracy", "multilabel": "F1", "regression": "R2"}

HEADINGS = ("task", "graph", "nodes", "edges", "reach", "backend", "time\na step", "memory")
_LEFT_ALIGNED = ("task", "graph", "backend")
LEGEND = {
    "nodes": "of the graph that the model runs over; the tokens of a text, and of several graphs those of the largest",
    "edges": "of the graph that the model runs over: both directions of links count, and self-loops where it has them",
    "reach": "share of all pairs of nodes that the model's layers connect; about one half at most for causal graphs",
    "backend": "selected by the plan; dense computes all pairs and masks those without an edge, "
    "tiles the blocks of pairs that have edges, csr the edges only",
    "time a step": "median over all steps of forward, backward and optimizer step",
    "memory": "what the forward pass of a training step stores for the backward pass besides parameters",
}
_MEASURED = {
    "loss": "nats per character on the validation text",
    "accuracy": "of test nodes or graphs",
    "F1": "of the labels of test nodes or graphs",
    "R2": "of the numbers of test nodes or graphs",
    "recall": "of the asked letter, in the second half of texts",
    "AUC": "how often a test link scores higher than an absent pair",
    "MRR": "mean of 1 / rank of the nodes at the other end of test links",
}


@dataclass(frozen=True)
class TextSettings:
    """A character model and its training; the defaults are the best for half a minute on two cores."""

    context: int = 48
    dim: int = 64
    heads: int = 4
    layers: int = 2
    batch: int = 32
    lr: float = 6e-3
    steps: int = 700
    attention: str = "dot"
    aggregate: str = "sum"
    precision: Precision = "no"


@dataclass(frozen=True)
class Corpus:
    """A text as numbers, int64 [characters]; the last tenth is for validation, `digest` identifies the text."""

    name: str
    digest: str
    characters: data.Characters
    train: Tensor
    val: Tensor

    @staticmethod
    def of(name: str, text: str, context: int) -> "Corpus":
        """Raises ValueError if the validation part is too short for one crop."""
        characters = data.Characters(text)
        tokens = characters.encode(text)
        cut = len(tokens) - int(len(tokens) * _VALIDATION)
        if len(tokens) - cut <= context:
            least = int((context + 1) / _VALIDATION) + 1
            raise ValueError(f"{name} has {len(tokens)} characters; a context of {context} needs about {least:,}")
        digest = sha256(text.encode()).hexdigest()[:8]
        return Corpus(name, digest, characters, tokens[:cut], tokens[cut:])


def manual() -> str:
    """Python's manual without its tables, because a small model would mostly learn their rulers and blanks."""
    lines = data.pydoc_topics().split("\n")
    return "\n".join(line for line in lines if not line.lstrip().startswith(("|", "+")))


@dataclass(frozen=True)
class Nodes:
    """Nodes to classify, their default graph, and the settings of the GAT; `digest` identifies the user's files and how
    they are read."""

    name: str
    data: data.PointClassification
    own_graph: str
    dropout: float
    lr: float
    patience: int | None
    digest: str = ""

    @staticmethod
    def digits() -> "Nodes":
        return Nodes("digits", data.digits(), "knn(8)", dropout=0.3, lr=0.01, patience=None)

    @staticmethod
    def cora() -> "Nodes":
        """With the settings of Velickovic et al. 2018, section 3.3."""
        papers = data.cora()
        normalized = replace(papers, x=data.row_normalize(papers.x))
        return Nodes("cora", normalized, "cora", dropout=0.6, lr=0.005, patience=100)

    @staticmethod
    def of_files(nodes: Path, edges: EdgeFile | None, seed: int, **tables: Any) -> "Nodes":
        """The graph in files of the user's own, see `mpnn.data.node_tables`."""
        content = data.node_tables(nodes, edges=edges, seed=seed, **tables)
        own = "knn(8)" if edges is None else "edges"
        digest = digest_of([nodes], edges, tables)
        return Nodes("edges", content, own, dropout=0.5, lr=0.01, patience=None, digest=digest)

    @property
    def outputs(self) -> Outputs:
        """Returns the meaning of the outputs of a model."""
        known = getattr(self.data, "outputs", None)
        return known or Outputs("classes", tuple(map(str, range(self.data.num_classes))))

    def to(self, device: str) -> "Nodes":
        """The same nodes on a device."""
        values = {f.name: getattr(self.data, f.name) for f in fields(self.data)}
        tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, data=replace(self.data, **tensors))

    def graph(self, expression: str) -> Graph:
        """The graph of `graph_over`."""
        return graph_over(self.data, self.name, expression)

    def save(self, folder: Path) -> None:
        """Writes names of nodes and features, and what outputs mean."""
        save_names(folder, self.data, self.outputs)


def digest_of(paths: Sequence[Path], edges: EdgeFile | None, tables: Mapping[str, Any]) -> str:
    """Identifies files of the user's own, `tables` among them, and how they are read."""
    all_paths = [*paths, tables.get("labels"), None if edges is None else edges.path, tables.get("split")]
    digests = [sha256(path.read_bytes()).digest() for path in all_paths if path is not None]
    read = ("columns", "weights", "directed", "first", "features", "repeats")
    how = {} if edges is None else {name: getattr(edges, name) for name in read}
    how |= {name: value for name, value in tables.items() if not isinstance(value, Path)}
    said = " ".join(f"{name}={value}" for name, value in how.items() if value)
    return f"{sha256(b''.join(digests)).hexdigest()[:8]} {said}"


def say_how_read(understood: Iterable[tuple[str, str]]) -> None:
    """Prints how each file was read, as a table."""
    grid = Table.grid(padding=(0, 2))
    for file, what in understood:
        grid.add_row(escape(file), escape(what), style="dim")
    if grid.row_count:
        console.console.print(grid)


def save_names(folder: Path, tables: Any, outputs: Outputs) -> None:
    """Writes the names of nodes (or graphs), how columns became features, and what outputs mean, to a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    known = getattr(tables, "columns", {})
    columns = {table: {name: asdict(column) for name, column in of.items()} for table, of in known.items()}
    content = {"ids": getattr(tables, "ids", None), "columns": columns, "outputs": asdict(outputs)}
    text = json.dumps(content) + "\n"
    write_atomically(folder / NODES, lambda path: path.write_text(text, encoding="utf-8"))


def graph_over(nodes: data.PointClassification | NodeInputs, name: str, expression: str) -> Graph:
    """Parses `name`, `cora` or `edges` (the links of the data), or `knn(k)` (k nearest by features, undirected), both
    with self-loops, or any other topology, used unchanged."""
    x = nodes.x
    edges = getattr(nodes, "edge_index", None)
    weight, features = (getattr(nodes, name, None) for name in ("edge_weight", "edge_features"))
    if edges is not None and expression.strip() == name:
        attributes = features if weight is None else weight[:, None]
        fill = 1.0 if features is None else 0.0
        return from_edges(edges, len(x), edge_attr=attributes).with_self_loops(fill=fill)
    if weight is not None or features is not None:
        option = "--weights" if features is None else "--edge-features"
        raise ValueError(f"{option} are those of --edges; leave --graph {expression} out")
    nearest = re.fullmatch(r"\s*knn\((\d+)\)\s*", expression)
    if nearest is not None:
        return knn(x.cpu(), int(nearest[1])).undirected().with_self_loops().to(x.device)
    alone = "knn" if edges is None else rf"knn|{name}"
    if joined := re.search(rf"\b({alone})\b", expression):
        raise ValueError(
            f"{joined[1]} is a graph of its own, which | & - ~ do not join with others; got {expression!r}. In Python, "
            "graphs.from_edges takes the edges of several graphs"
        )
    return parse(expression).bind(len(x)).to(x.device)


@dataclass(frozen=True)
class NodeSettings:
    """A model of nodes; None stands for the default of the model or of the data."""

    model: str = "gat"
    aggregate: str | None = None
    dim: int | None = None
    heads: int | None = None
    layers: int | None = None
    dropout: float | None = None
    lr: float | None = None


NodeModel = GAT | GCN | GIN | GNN | GraphSAGE | GraphTransformer
NODE_MODELS: dict[str, type[NodeModel]] = {
    "gat": GAT,
    "gatv2": GATv2,
    "gcn": GCN,
    "sage": GraphSAGE,
    "gin": GIN,
    "transformer": GraphTransformer,
    "gnn": GNN,
}


def node_model(nodes: Nodes, settings: NodeSettings) -> NodeModel:
    """The model of these settings. A setting that it lacks is refused."""
    kind, wanted = model_options(settings, nodes.data)
    return kind(nodes.data.x.shape[1], len(nodes.outputs.names), **{"dropout": nodes.dropout, **wanted})


def model_options(settings: NodeSettings, tables: Any) -> tuple[type[NodeModel], dict[str, Any]]:
    """The class of these settings and its options, for `tables` with weights or features of edges, or neither."""
    if settings.model not in NODE_MODELS:
        raise ValueError(unknown("model of nodes", settings.model, NODE_MODELS))
    kind = NODE_MODELS[settings.model]
    takes = inspect.signature(kind).parameters
    wanted = {
        name: value for name, value in asdict(settings).items() if value is not None and name not in ("model", "lr")
    }
    if (width := wanted.pop("dim", None)) is not None:
        heads = settings.heads or takes["heads"].default if "heads" in takes else 1
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}; choose another --dim or --heads")
        wanted["hidden"] = width // heads
    edge_features = getattr(tables, "edge_features", None)
    if edge_features is not None:
        wanted["edge_dim"] = edge_features.shape[1]
    elif getattr(tables, "edge_weight", None) is not None and settings.model != "gcn":
        wanted["edge_dim"] = 1
    for name in wanted:
        if name not in takes:
            weighs = name == "edge_dim" and edge_features is None
            option = "weights or --repeats sum" if weighs else "edge-features" if name == "edge_dim" else name
            whose = [other for other, model in NODE_MODELS.items() if name in inspect.signature(model).parameters]
            whose += ["gcn"] if weighs else []
            raise ValueError(f"{settings.model} has no --{option}; choose --model {', '.join(whose)}")
    return kind, wanted


M = TypeVar("M", bound=nn.Module)


class Run(ABC):
    """One training run. The constructor validates all settings before the first step.

    Args:
        task: which models and options there are.
        expression: the graph.
        sizes: the settings of the model; None stands for a default.
        measure: what the result is, such as accuracy.
        data: identifies the data.
        understood: how each file of the user's own was read.

    Attributes:
        name: what people call the task.
        model: the model, which is trained in place.
        graph, layers: what the model runs over, and how many times.
        settings: all settings that determine the trained weights, by name.
        history, backend, saved_bytes: what the training measured.
        measured: what the model and its baselines reached, by name and measure; empty if the result says all.
    """

    graph: Graph
    layers: int
    model: Model
    history: History
    backend: str
    saved_bytes: int
    measured: Mapping[str, Mapping[str, float]] = {}

    def __init__(
        self,
        task: str,
        expression: str,
        steps: int,
        seed: int,
        sizes: Any = None,
        *,
        measure: str,
        device: str = "cpu",
        precision: Precision = "no",
        data: str = "",
        understood: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.name = task
        self.expression = expression
        self.steps = steps
        self.seed = seed
        self.measure = measure
        self.device = device
        self.precision: Precision = precision
        self.understood = understood
        of_model = {} if sizes is None else asdict(sizes)
        self.settings: dict[str, int | float | str] = {
            "task": task,
            "graph": expression,
            "seed": seed,
            "steps": steps,
            "device": device,
            "data": data,
            "precision": precision,
            **{name: value for name, value in of_model.items() if value is not None},
        }

    def seeded(self, build: Callable[[], M]) -> M:
        """The model, with weights that the seed decides. Training then continues the random numbers of its weights."""
        torch.manual_seed(self.seed)
        model = build().to(self.device)
        self._random = torch.get_rng_state()
        return model

    def fit(self, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> History:
        """Trains the model."""
        torch.set_rng_state(self._random)
        return self.trained(progress, checkpoint)

    @abstractmethod
    def trained(self, progress: Progress | None, checkpoint: Checkpoint | None) -> History:
        """Trains the model, with torch's random numbers as they are."""

    @abstractmethod
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of the model in a training step."""

    @abstractmethod
    def loss(self) -> Tensor:
        """The loss of a training step, on a new batch."""

    @abstractmethod
    def optimizer(self, rate: float) -> Optimizer:
        """The optimizer of the model, with this learning rate."""

    @abstractmethod
    def error(self) -> float:
        """The validation error of the model: a loss, or a share of wrong answers."""

    @abstractmethod
    def evaluate(self, model: Model) -> str:
        """Returns the result of `model` on the held-out data and that of a baseline, as text."""

    def train(self, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> "Run":
        """Trains the model and measures it."""
        self.history = self.fit(progress, checkpoint)
        self.saved_bytes = bytes_for_backward(self.model, self.loss)
        self.backend = backends(self.model, *self.inputs())
        return self

    @property
    def result(self) -> str:
        accuracy = self.history.test_accuracy
        return f"{self.history.val_loss[-1]:.3f}" if accuracy is None else f"{accuracy:.1%}"

    @property
    def row(self) -> tuple[str, ...]:
        """The cells under `headings`."""
        return (
            self.name,
            self.expression,
            f"{self.graph.num_dst:,}",
            f"{self.graph.num_edges:,}",
            f"{self.graph.reach(self.layers):.1%}",
            self.backend,
            f"{self.history.seconds_per_step * 1e3:.0f} ms",
            console.memory(self.saved_bytes),
            self.result,
        )

    def save(self, folder: Path) -> None:
        """Writes the model with `save_pretrained`, and any other files needed to use it."""
        self.model.save_pretrained(folder)

    def check_saving(self) -> None:
        """Saves the untrained model to a temporary folder, so that one that cannot be saved fails before training."""
        with suppress(OSError, SafetensorError), TemporaryDirectory() as folder:  # not an error of the model
            self.save(Path(folder))


class TextRun(Run):
    """A GPT over a topology. The initial weights and the batches depend on the seed only, not on the graph."""

    def __init__(self, expression: str, corpus: Corpus, settings: TextSettings, seed: int, device: str = "cpu") -> None:
        data = f"{corpus.name} ({corpus.digest})"
        super().__init__("text", expression, settings.steps, seed, settings, measure="loss", device=device, data=data)
        self.name = corpus.name
        self.corpus = corpus
        self.sizes = settings
        self.layers = settings.layers
        topology = parse(expression)
        self.graph = topology.bind(settings.context)
        self.model: GPT = self.seeded(
            lambda: GPT(
                len(corpus.characters),
                settings.dim,
                settings.heads,
                settings.layers,
                topology,
                context=settings.context,
                attention=settings.attention,
                aggregate=cast(Any, settings.aggregate),
            )
        )

    def trained(self, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> History:
        settings = self.sizes
        torch.manual_seed(self.seed)
        return fit_language_model(
            self.model,
            self.corpus.train,
            self.corpus.val,
            settings.steps,
            batch=settings.batch,
            lr=settings.lr,
            validate_every=max(settings.steps // _VALIDATIONS, 1),
            precision=settings.precision,
            progress=progress,
            checkpoint=checkpoint,
        )

    def inputs(self) -> tuple[Any, ...]:
        return (self.corpus.train[: self.sizes.context].repeat(self.sizes.batch, 1).to(self.device),)

    def loss(self) -> Tensor:
        batch = data.batches(self.corpus.train, self.sizes.context, self.sizes.batch)
        return self.model.loss(*(tokens.to(self.device) for tokens in batch))

    def optimizer(self, rate: float) -> Optimizer:
        return adamw(self.model, rate)

    def error(self) -> float:
        return language_model_loss(self.model, self.corpus.val, self.sizes.batch, _CROPS)

    def evaluate(self, model: Model) -> str:
        assert isinstance(model, GPT)
        loss = language_model_loss(model, self.corpus.val, self.sizes.batch)
        frequent = character_loss(self.corpus)
        return (
            f"loss {loss:.3f} nats per character on the last tenth of {self.corpus.name}; {frequent:.3f} by the "
            "frequency of characters alone"
        )

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        symbols = self.corpus.characters.symbols
        write_atomically(folder / CHARACTERS, lambda path: path.write_text(symbols, encoding="utf-8", newline=""))
        super().save(folder)


class NodeRun(Run):
    """A graph network, trained on all nodes in each step."""

    def __init__(
        self,
        expression: str,
        nodes: Nodes,
        epochs: int,
        seed: int,
        sizes: NodeSettings = NodeSettings(),
        *,
        device: str = "cpu",
        precision: Precision = "no",
    ) -> None:
        super().__init__(
            nodes.name,
            expression,
            epochs,
            seed,
            sizes,
            measure=MEASURES[nodes.outputs.problem],
            device=device,
            precision=precision,
            data=nodes.digest,
            understood=getattr(nodes.data, "understood", ()),
        )
        self.nodes = nodes.to(device)
        self.graph = self.nodes.graph(expression)
        self.rate = sizes.lr or nodes.lr
        self.model = self.seeded(lambda: node_model(self.nodes, sizes))
        self.layers = sum(isinstance(module, MessagePassing) for module in self.model.modules())

    def trained(self, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> History:
        return fit_node_classifier(
            self.model,
            self.graph,
            self.nodes.data,
            self.optimizer(self.rate),
            epochs=self.steps,
            patience=self.nodes.patience,
            precision=self.precision,
            progress=progress,
            checkpoint=checkpoint,
        )

    def inputs(self) -> tuple[Any, ...]:
        return self.nodes.data.x, self.graph

    def loss(self) -> Tensor:
        nodes = self.nodes.data
        return node_loss(self.model(nodes.x, self.graph)[nodes.train_mask], nodes.y[nodes.train_mask])

    def optimizer(self, rate: float) -> Optimizer:
        return Adam(self.model.parameters(), lr=rate, weight_decay=_WEIGHT_DECAY)

    def error(self) -> float:
        nodes = self.nodes.data
        mask = nodes.val_mask if nodes.val_mask.any() else nodes.test_mask
        return 1 - node_scores(self.model, self.graph, nodes, mask)[1]

    def evaluate(self, model: Model) -> str:
        nodes = self.nodes.data
        with torch.no_grad():
            outputs = model.eval()(nodes.x, self.graph)[nodes.test_mask]
        return said_of_test(outputs, nodes.y, nodes.train_mask, nodes.test_mask, self.nodes.outputs, "nodes")

    def save(self, folder: Path) -> None:
        self.nodes.save(folder)
        super().save(folder)


def character_loss(corpus: Corpus) -> float:
    """The loss on the validation text, in nats per character, of the frequencies of characters in training."""
    counts = torch.bincount(corpus.train, minlength=len(corpus.characters)) + 1.0
    return -(counts / counts.sum()).log()[corpus.val].mean().item()


def said_of_test(values: Tensor, y: Tensor, train: Tensor, test: Tensor, outputs: Outputs, rows: str) -> str:
    """How good the outputs [n, C] of test nodes, or graphs, are, and an answer that does not read the features, as
    text.

    Args:
        y: the targets of all, [N] or [N, C].
        train, test: which are for training and for the test, bool [N].
    """
    target = y[test]
    loss = node_loss(values, target).item()
    score = node_score(values, target)
    where = f"on {len(target):,} test {rows}"
    name, constant = baseline(y[train], outputs)
    base = node_score(constant.expand(len(target), -1), target)
    if outputs.problem != "regression":
        return f"{MEASURES[outputs.problem]} {score:.1%}, loss {loss:.3f} nats, {where}; {base:.1%} by {name}"
    error = (values - target).square().mean(0).sqrt().tolist()
    errors = [f"{e * s:.4g} ({name})" for e, s, name in zip(error, outputs.std, outputs.names, strict=True)]
    return f"R2 {score:.1%}, root mean squared error {', '.join(errors)}, {where}; {base:.1%} by {name}"


def baseline(y: Tensor, outputs: Outputs) -> tuple[str, Tensor]:
    """The answer that is the same for all rows and best in training, y [n] or [n, C]: how people call it, and the
    outputs [1, C] that stand for it."""
    if outputs.problem == "classes":
        counts = torch.bincount(y, minlength=len(outputs.names))
        return f"always {outputs.names[int(counts.argmax())]}, the most frequent class", counts[None].float()
    if outputs.problem == "multilabel":
        return "the more frequent value of each label", y.float().mean(0, keepdim=True) - 0.5
    return "always the mean", y.mean(0, keepdim=True)


def train_all(runs: Sequence[Run], checkpoints: Sequence[Checkpoint], processes: int = 1) -> list[Run]:
    """Trains the runs, each with its checkpoint and a progress bar: one after the other, or in several processes."""
    with stop_between_steps() as check, console.training_bars() as bars:
        queue = [
            (run, bars.add_task(" ".join(dict.fromkeys((run.name, run.expression))), total=run.steps, note=""))
            for run in runs
        ]
        ticks = [partial(_tick, bars, bar, check) for _, bar in queue]
        if processes > 1:
            side_by_side.train(runs, checkpoints, processes, check, lambda k, step, history: ticks[k](step, history))
        return [run.train(tick, checkpoint) for run, tick, checkpoint in zip(runs, ticks, checkpoints, strict=True)]


def _tick(bars: Bars, bar: TaskID, check: Callable[[], None], step: int, history: History) -> None:
    bars.update(bar, completed=step, note=f"loss {history.train_loss[-1]:.2f}")
    check()


def headings(results: Sequence[Run]) -> tuple[str, ...]:
    """The headings above `Run.row`."""
    return *HEADINGS, " or\n".join(dict.fromkeys(result.measure for result in results))


def meanings(results: Sequence[Run]) -> dict[str, str]:
    """Returns the meaning of each column."""
    return LEGEND | {result.measure: _MEASURED[result.measure] for result in results}


def table(results: Sequence[Run]) -> Table:
    """The results as a table."""
    return console.table(headings(results), (result.row for result in results), _LEFT_ALIGNED)


def legend(results: Sequence[Run]) -> Table:
    """The meanings of the columns of the table."""
    grid = Table.grid(padding=(0, 2))
    for name, meaning in meanings(results).items():
        grid.add_row(name, meaning, style="dim")
    return grid
