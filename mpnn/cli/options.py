"""The options of `mpnn train` that decide which model is trained on what. `run.json` keeps them for `mpnn eval`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mpnn import data
from mpnn.cli import tasks
from mpnn.cli.tasks import Corpus, NodeRun, Nodes, Run, TextRun, TextSettings
from mpnn.train.loop import Precision

_DEFAULT = TextSettings()
EPOCHS = 200


@dataclass(frozen=True)
class Options:
    """Options of a training run; None stands for the default of the task."""

    task: str = "text"
    graph: str | None = None
    steps: int | None = None
    seed: int = 0
    device: str = "cpu"
    attention: str | None = None
    aggregate: str = "sum"
    text: str = "pydoc"
    file: str | None = None
    context: int = _DEFAULT.context
    dim: int = _DEFAULT.dim
    heads: int = _DEFAULT.heads
    layers: int = _DEFAULT.layers
    batch: int = _DEFAULT.batch
    lr: float = _DEFAULT.lr
    edges: str | None = None
    features: str | None = None
    labels: str | None = None
    precision: Precision = "no"

    @staticmethod
    def read(written: Any) -> Options:
        """The options in a file that `asdict` of others was written to.

        Raises:
            ValueError: if they are not options.
        """
        names = {field.name for field in fields(Options)}
        if not isinstance(written, Mapping) or set(written) != names:
            raise ValueError(f"expected the options {', '.join(sorted(names))}")
        return Options(**written)

    def run(self) -> Run:
        """The run, before its first step.

        Raises:
            ValueError, OSError: if an option is out of range, a file cannot be read, or they do not fit together.
        """
        numbers = {name: getattr(self, name) for name in ("context", "dim", "heads", "layers", "batch", "lr", "steps")}
        for name, value in numbers.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} must be more than 0; got {value}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--seed must fit into 64 bits; got {self.seed}")
        if self.graph is not None and not self.graph.strip():
            raise ValueError('--graph is empty; name a topology, such as "causal & window(16)", or leave --graph out')
        if self.file is not None and self.task != "text":
            raise ValueError(
                f"--file is text to train on, but --task {self.task} has its own data; leave one of them out"
            )
        _check_device(self.device)
        if self.precision == "fp16" and self.device == "cpu":
            raise ValueError("--precision fp16 needs a GPU: torch computes it on GPUs only; use bf16, or --device cuda")
        if (self.features is None) != (self.labels is None) or (self.edges is not None and self.features is None):
            raise ValueError("a graph of your own needs --features and --labels, and --edges unless --graph makes them")
        if self.features is not None and (self.file is not None or self.task != "text"):
            raise ValueError("--features, --labels and --edges are the data; --task and --file name others")
        if self.task == "text" and self.features is None:
            sizes = TextSettings(
                self.context,
                self.dim,
                self.heads,
                self.layers,
                self.batch,
                self.lr,
                _DEFAULT.steps if self.steps is None else self.steps,
                self.attention or _DEFAULT.attention,
                self.aggregate,
                self.precision,
            )
            return TextRun(self.graph or "causal", self.corpus(), sizes, self.seed, self.device)
        nodes = self.nodes()
        return NodeRun(
            self.graph or nodes.own_graph,
            nodes,
            EPOCHS if self.steps is None else self.steps,
            self.seed,
            attention=self.attention or "additive",
            aggregate=self.aggregate,
            device=self.device,
            precision=self.precision,
        )

    def nodes(self) -> Nodes:
        """Raises ValueError or OSError if the files cannot be read."""
        if self.features is not None and self.labels is not None:
            edges = None if self.edges is None else Path(self.edges)
            return Nodes.of_files(Path(self.features), Path(self.labels), edges, self.seed)
        return Nodes.cora() if self.task == "cora" else Nodes.digits()

    def corpus(self) -> Corpus:
        """Raises ValueError or OSError if the file cannot be read."""
        if self.file is not None:
            file = Path(self.file)
            try:
                return Corpus.of(file.name, file.read_text(encoding="utf-8"), self.context)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from None
        content = tasks.manual() if self.text == "pydoc" else data.tinyshakespeare()
        return Corpus.of(self.text, content, self.context)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an AssertionError if torch was compiled without CUDA
        why = str(error).splitlines()[0]
        raise ValueError(f"there is no device {name!r} here ({why}); use --device cpu") from None
