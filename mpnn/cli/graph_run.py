"""Training runs of `mpnn train` on whole graphs: classes or numbers of each graph in a table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mpnn import Graph, MessagePassing
from mpnn.cli.tasks import (
    MEASURES,
    NodeSettings,
    Run,
    digest_of,
    model_options,
    said_of_test,
    save_names,
)
from mpnn.data.graph_tables import GraphInputs, GraphTables, graph_tables
from mpnn.data.tables import EdgeFile
from mpnn.graphs import batch as union, from_edges, parse
from mpnn.models import GIN, GraphPredictor
from mpnn.models.saving import Model
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import History, Precision, Progress, Settings, fit, shuffled
from mpnn.train.node_classifier import node_loss, node_score

OWN = "edges"
_VALIDATIONS = 50
_RATE = 0.005
_AT_ONCE = 256  # graphs in a batch that is not trained on
_NEED_LOOPS = ("gat", "gatv2", "gcn")  # the other models have a term of the node itself
_WIDTH = 64


@dataclass(frozen=True)
class GraphSettings(NodeSettings):
    """A model of graphs and its training; the defaults are those of the GIN paper's model, with a readout of its own.

    readout: "sum", "mean" or "max" over the nodes of a graph; None: the sum for GIN, which has no other, else the mean.
    batch: graphs in a step.
    """

    model: str = "gin"
    readout: str | None = None
    batch: int = 32


@dataclass(frozen=True)
class Collection:
    """Graphs of the user's own; `digest` identifies the files and how they are read. `starts`, `edge_starts` [G + 1]:
    the first node and the first edge of each graph."""

    data: GraphInputs
    digest: str
    starts: Tensor
    edge_starts: Tensor

    @staticmethod
    def of(tables: GraphInputs, digest: str = "") -> "Collection":
        ids = tables.ids
        assert ids is not None
        edges_of = tables.graph[tables.edge_index[1]]
        return Collection(tables, digest, _starts(tables.graph, len(ids)), _starts(edges_of, len(ids)))

    @staticmethod
    def of_files(graphs: Path, nodes: Path, edges: EdgeFile | None, seed: int, **tables: Any) -> "Collection":
        """See `mpnn.data.graph_tables`."""
        content = graph_tables(graphs, nodes, edges, seed, **tables)
        return Collection.of(content, digest_of([graphs, nodes], edges, tables))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, which: Tensor, expression: str, loops: bool) -> tuple[Tensor, Graph, Graph]:
        """The features of the nodes of some graphs, the union of these graphs, and which node belongs to which.

        expression: `edges` for the edges of the tables, or another topology, bound to each graph.
        """
        nodes, of = _ranges(self.starts, which)
        x = self.data.x[nodes]
        pool = from_edges(torch.stack([torch.arange(len(of)), of]), num_src=len(of), num_dst=len(which))
        if expression.strip() != OWN:
            sizes = (self.starts[which + 1] - self.starts[which]).tolist()
            topology = parse(expression)
            return x, union([topology.bind(size) for size in sizes]), pool
        edges, of_edge = _ranges(self.edge_starts, which)
        shift = torch.bincount(of, minlength=len(which)).cumsum(0)[:-1]
        shift = torch.cat([shift.new_zeros(1), shift]) - self.starts[which]
        index = self.data.edge_index[:, edges] + shift[of_edge]
        weight = self.data.edge_weight
        features = self.data.edge_features
        attr = features[edges] if features is not None else None if weight is None else weight[edges, None]
        graph = from_edges(index, len(x), edge_attr=attr)
        return x, graph.with_self_loops(fill=1.0 if features is None else 0.0) if loops else graph, pool


def _starts(of: Tensor, count: int) -> Tensor:
    return torch.cat([of.new_zeros(1), torch.bincount(of, minlength=count).cumsum(0)])


def _ranges(starts: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """The members of some graphs, graph by graph, and the place of the graph of each."""
    sizes = starts[which + 1] - starts[which]
    of = torch.repeat_interleave(torch.arange(len(which)), sizes)
    return torch.arange(len(of)) - (sizes.cumsum(0) - sizes - starts[which])[of], of


def graph_model(tables: GraphInputs, outputs: int, settings: GraphSettings) -> GIN | GraphPredictor:
    """The model of these settings. A setting that it lacks is refused."""
    plain = NodeSettings(**{name: getattr(settings, name) for name in NodeSettings.__dataclass_fields__})
    kind, wanted = model_options(plain, tables)
    wanted = {"dropout": 0.0, **wanted}
    if kind is GIN:
        if settings.readout not in (None, "sum"):
            raise ValueError(f"the readout of gin is a sum after each layer; got --readout {settings.readout}")
        return GIN(tables.x.shape[1], outputs, **wanted)
    width = settings.dim or _WIDTH
    return GraphPredictor(
        kind(tables.x.shape[1], width, **wanted), width, outputs, cast(Any, settings.readout or "mean")
    )


def predictions(model: nn.Module, graphs: Collection, which: Tensor, expression: str, loops: bool) -> Tensor:
    """The outputs of a model for some graphs [G, C]."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        parts = (graphs.batch(part, expression, loops) for part in which.split(_AT_ONCE))
        return torch.cat([model(*(one.to(device) for one in part)).cpu() for part in parts])


def has_loops(model: str | None) -> bool:
    """Whether graphs get self-loops for this model."""
    return model in _NEED_LOOPS


class GraphRun(Run):
    """A graph network with a readout, trained on batches of graphs. The weights with the lowest validation loss are
    kept. `graph` is the largest of the graphs."""

    def __init__(
        self,
        expression: str,
        graphs: Collection,
        steps: int,
        seed: int,
        sizes: GraphSettings,
        *,
        device: str = "cpu",
        precision: Precision = "no",
    ) -> None:
        assert isinstance(graphs.data, GraphTables)
        super().__init__(
            "graphs",
            expression,
            steps,
            seed,
            sizes,
            measure=MEASURES[graphs.data.outputs.problem],
            device=device,
            precision=precision,
            data=graphs.digest,
            understood=graphs.data.understood,
        )
        self.tables = graphs.data
        self.graphs = graphs
        self.sizes = sizes
        self.rate = sizes.lr or _RATE
        if expression.strip() != OWN and (graphs.data.edge_weight is not None or graphs.data.edge_features is not None):
            raise ValueError(f"weights and features are those of --edges; leave --graph {expression} out")
        self.model = self.seeded(lambda: graph_model(self.tables, len(self.tables.outputs.names), sizes))
        self.layers = sum(isinstance(module, MessagePassing) for module in self.model.modules())
        self.parts = [mask.nonzero().squeeze(1) for mask in (graphs.data.train_mask, graphs.data.val_mask)]
        self._batches = 0
        largest = (graphs.starts[1:] - graphs.starts[:-1]).argmax()
        _, self.graph, _ = self._batch(largest[None])

    def trained(self, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> History:
        if checkpoint is not None:
            checkpoint.describe(graphs=len(self.graphs), optimizer=" ".join(repr(self.optimizer(self.rate)).split()))
        history = fit(
            self.model,
            self.optimizer(self.rate),
            self._loss,
            Settings(
                self.steps,
                precision=self.precision,
                validate_every=max(self.steps // _VALIDATIONS, 1),
                keep="best",
            ),
            validate=lambda: {"loss": self._measured(self.parts[1])[0]},
            progress=progress,
            checkpoint=checkpoint,
        )
        history.test_accuracy = self._measured(self._test)[1]
        return history

    def inputs(self) -> tuple[Any, ...]:
        return self._batch(self._numbers(0))

    def loss(self) -> Tensor:
        self._batches += 1
        return self._loss(self._batches)

    def optimizer(self, rate: float) -> Optimizer:
        return Adam(self.model.parameters(), lr=rate)

    def error(self) -> float:
        return 1 - self._measured(self.parts[1])[1]

    def evaluate(self, model: Model) -> str:
        values = predictions(model, self.graphs, self._test, self.expression, self._loops)
        tables = self.tables
        return said_of_test(values, tables.y, tables.train_mask, tables.test_mask, tables.outputs, "graphs")

    def save(self, folder: Path) -> None:
        save_names(folder, self.tables, self.tables.outputs)
        super().save(folder)

    @property
    def _loops(self) -> bool:
        return has_loops(self.sizes.model)

    @property
    def _test(self) -> Tensor:
        return self.tables.test_mask.nonzero().squeeze(1)

    def _numbers(self, k: int) -> Tensor:
        """The graphs of batch k."""
        return self.parts[0][shuffled(len(self.parts[0]), self.sizes.batch, k, self.seed)]

    def _batch(self, which: Tensor) -> tuple[Tensor, Graph, Graph]:
        x, graph, pool = self.graphs.batch(which, self.expression, self._loops)
        return x.to(self.device), graph.to(self.device), pool.to(self.device)

    def _loss(self, k: int) -> Tensor:
        which = self._numbers(k)
        return node_loss(self.model(*self._batch(which)), self.tables.y[which].to(self.device))

    def _measured(self, which: Tensor) -> tuple[float, float]:
        """The loss and the score of some graphs."""
        values = predictions(self.model, self.graphs, which, self.expression, self._loops)
        y = self.tables.y[which]
        return node_loss(values, y).item(), node_score(values, y)
