"""The options that decide which model is trained on what, each stated once, for `mpnn train` and `mpnn compare`.

`run.json` keeps them for `mpnn eval`.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from mpnn import data
from mpnn.cli import tasks
from mpnn.cli.tasks import Corpus, NodeRun, Nodes, Run, TextRun, TextSettings
from mpnn.tables import named

EPOCHS = 200
Defaults = Mapping[str, Mapping[str, Any]]
"""The options of each task, with their defaults; None for one that has no default, or that depends on the data."""

_SHARED = {"graph": None, "seed": 0, "device": "cpu", "aggregate": "sum", "precision": "float32"}
_NODES = {**_SHARED, "steps": EPOCHS, "attention": "additive"}
DEFAULTS: Defaults = {
    "text": {**asdict(TextSettings()), **_SHARED, "text": "pydoc", "file": None},
    "cora": _NODES,
    "digits": _NODES,
    "edges": {**_NODES, "edges": None, "features": None, "labels": None, "columns": None},
}
_NAMES = {"text": "data"}  # of options whose name is another than that of the field


Task = Literal["text", "cora", "digits"]
TextName = Literal["pydoc", "tinyshakespeare"]
Arithmetic = Literal["float32", "bf16", "fp16"]


def _option(kind: Any, help: str, panel: str | None = None, metavar: str | None = None, **more: Any) -> Any:
    settings = {"help": help, "rich_help_panel": panel, "metavar": metavar, **more}
    return field(default=None, metadata={"kind": kind, "settings": settings})


_TEXT, _OWN = "Text only", "A graph of your own"


@dataclass(frozen=True)
class Options:
    """Options of a training run. None stands for the default of the task, or for an option that the task lacks."""

    task: str | None = _option(
        Task,
        "A GPT on characters (text), or a GAT on nodes (cora, digits). Default: text, unless --features are given.",
    )
    graph: str | None = _option(
        str,
        "The graph: a topology (see mpnn graph --help), or cora (its citations) or knn(k) (nearest features), "
        "both with self-loops. Default: causal for text, cora for cora, knn(8) for digits.",
        metavar="EXPR",
    )
    steps: int | None = _option(int, "Training steps (text) or epochs (nodes).")
    attention: str | None = _option(
        str,
        "For text: dot, additive, linear; over causal alone retention, gated, state_space, delta. "
        "For nodes: additive (GAT), additive_v2, dot, degree (GCN) or none.",
        metavar="NAME",
    )
    aggregate: str | None = _option(
        str, "How messages are combined: sum, mean, max, ... For nodes, see --attention.", metavar="NAME"
    )
    precision: str | None = _option(
        Arithmetic,
        "Arithmetic of the steps. bf16 and fp16 (GPUs only) are mixed precision: weights, optimizer and validation "
        "stay in float32.",
    )
    device: str | None = _option(str, "Device of the model, such as cpu or cuda.")
    seed: int | None = _option(int, "Random seed of weights and batches.")
    text: str | None = _option(TextName, "Which text.", _TEXT)
    file: str | None = _option(Path, "Your own text file (UTF-8), instead of --data.", _TEXT, dir_okay=False)
    context: int | None = _option(int, "Number of characters that the model reads at a time.", _TEXT)
    dim: int | None = _option(int, "Width of the model.", _TEXT)
    heads: int | None = _option(int, "Attention heads; must divide --dim.", _TEXT)
    layers: int | None = _option(int, "Number of layers.", _TEXT)
    batch: int | None = _option(int, "Crops of text per step.", _TEXT)
    lr: float | None = _option(float, "Maximum learning rate; mpnn compare tries half and twice of it, too.", _TEXT)
    features: str | None = _option(
        Path,
        "Your own nodes: a row of numbers for each (.npy, or text with commas, semicolons, tabs or blanks).",
        _OWN,
        dir_okay=False,
    )
    labels: str | None = _option(Path, "Their classes: one integer from 0 a row; -1 if unknown.", _OWN, dir_okay=False)
    edges: str | None = _option(
        Path,
        "Their links: two node numbers from 0 a row, used in both directions. Without it, --graph is knn(8).",
        _OWN,
        dir_okay=False,
    )
    columns: str | None = _option(
        str, "The two columns of --edges, by name or by number from 0, if it has more.", _OWN, metavar="SRC,DST"
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
        task = task or self.task or ("edges" if given.keys() & {"edges", "features", "labels"} else "text")
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
            return TextRun(options.graph or "causal", options.corpus(), options.sizes(), options.seed, options.device)
        nodes = options.nodes()
        return NodeRun(
            options.graph or nodes.own_graph,
            nodes,
            options.steps,
            options.seed,
            attention=options.attention,
            aggregate=options.aggregate,
            device=options.device,
            precision=options.precision,
        )

    def sizes(self) -> TextSettings:
        """The options of a text model, of resolved options."""
        values = {one.name: getattr(self, one.name) for one in fields(TextSettings)}
        return TextSettings(**{name: value for name, value in values.items() if value is not None})

    def nodes(self) -> Nodes:
        """The nodes, of resolved options. Raises ValueError or OSError if the files cannot be read."""
        if self.task == "edges":
            if self.features is None or self.labels is None:
                raise ValueError(
                    "a graph of your own needs --features and --labels, and --edges unless --graph makes them"
                )
            edges = None if self.edges is None else Path(self.edges)
            return Nodes.of_files(Path(self.features), Path(self.labels), edges, self.seed or 0, named(self.columns))
        return Nodes.cora() if self.task == "cora" else Nodes.digits()

    def corpus(self) -> Corpus:
        """The text, of resolved options. Raises ValueError or OSError if the file cannot be read."""
        context = self.sizes().context
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
            by_value.setdefault(values[one.name], []).append("text" if task == "text" else "nodes")
    shown = [f"{value} for {whose[0]}" for value, whose in by_value.items()]
    default = next(iter(by_value)) if len(by_value) == 1 else "; ".join(shown)
    name = f"--{_NAMES.get(one.name, one.name)}"
    option = typer.Option(name, show_default=str(default) if shown else False, **one.metadata["settings"])
    optional = one.metadata["kind"] | None
    return Annotated[optional, option]


def _plain(value: Any) -> Any:
    """Numbers and text, as JSON can hold them. Files are named from the root."""
    return str(value.absolute()) if isinstance(value, Path) else value


def _described(task: str) -> str:
    return {"edges": "a graph of your own (--features and --labels)", "hf": "--hf"}.get(task, f"--task {task}")


def _check_device(name: str | None) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an AssertionError if torch was compiled without CUDA
        why = str(error).splitlines()[0]
        raise ValueError(f"there is no device {name!r} here ({why}); use --device cpu") from None
