"""Training runs of `mpnn train` on links: which are missing, what a user takes next, which links a knowledge graph
lacks."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from mpnn.cli.tasks import NODES, Run
from mpnn.data.link_tables import LinkTables, Pairs
from mpnn.graph.files import write_atomically
from mpnn.graph.registry import unknown
from mpnn.models import RGCN, ComplEx, DistMult, Inner, LightGCN, LinkRanker
from mpnn.models.graph.link_ranker import popular_keys
from mpnn.models.saving import Model
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.link_ranker import LinkTraining, Part, fit_link_ranker, layers_of, link_measures, ranks_of
from mpnn.train.loop import History, Precision, Progress

EDGES = "edges"
MODELS = ("lightgcn", "rgcn", "embeddings")
DECODERS = ("inner", "distmult", "complex")
POPULARITY = "popularity"
_VALIDATIONS = 15
_WEIGHT_DECAY = 3e-4  # of all but the popularity, which would forget what it began with
_BASES = 16  # of R-GCN's maps, for more types of edges


@dataclass(frozen=True)
class LinkSettings:
    """A model of links and its training; the defaults take half a minute for MovieLens 100k on two cores.

    model: "lightgcn", "rgcn" or "embeddings"; None: rgcn for relations, else lightgcn.
    decoder: "inner", "distmult" or "complex"; None: complex for directed links, since it distinguishes both directions,
        distmult for relations between two sets, else inner.
    fanouts: in-neighbors that each layer receives from in a step, such as "15,10"; None: all.
    """

    model: str | None = None
    decoder: str | None = None
    dim: int = 64
    layers: int | None = None
    dropout: float = 0.5
    lr: float = 0.02
    batch: int = 4096
    fanouts: str | None = None


def fanouts_of(text: str) -> list[int]:
    """The numbers in a text such as "15,10"."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"--fanouts are whole numbers, one for each layer, such as 15,10; got {text!r}") from None


def link_model(tables: LinkTables, settings: LinkSettings) -> LinkRanker:
    """The model of these settings, which begins with the popularity of nodes in training."""
    split = tables.split
    relations = max(len(tables.relations), 1)
    num_src = len(tables.ids)
    num_dst = len(tables.dst_ids or tables.ids)
    keys, _ = popular_keys(tables.form, split.train, split.train_type, relations, max(num_src, num_dst))
    model = LinkRanker(
        tables.form,
        _decoder(tables, settings),
        _encoder(tables, settings),
        num_src=num_src,
        num_dst=num_dst,
        dim=settings.dim,
        relations=relations,
        in_dim=0 if tables.x is None else tables.x.shape[1],
        popular=len(keys),
        dropout=settings.dropout,
    )
    model.set_popularity(split.train, split.train_type)
    return model


def model_name(tables: LinkTables, settings: LinkSettings) -> str:
    return settings.model or ("rgcn" if tables.relations else "lightgcn")


def _encoder(tables: LinkTables, settings: LinkSettings) -> Model | None:
    name = model_name(tables, settings)
    relations = len(tables.relations)
    if name == "embeddings":
        if settings.layers is not None:
            raise ValueError("embeddings pass no messages, so they have no --layers; choose --model lightgcn or rgcn")
        return None
    if name == "lightgcn":
        if relations:
            raise ValueError(f"lightgcn does not distinguish {relations} relations; choose --model rgcn or embeddings")
        return LightGCN(settings.layers or 3)
    if name != "rgcn":
        raise ValueError(unknown("model of links", name, MODELS))
    types = max(relations, 1) if tables.form == "undirected" else 2 * max(relations, 1)
    bases = _BASES if types > _BASES else None
    return RGCN(settings.dim, settings.dim, types, settings.dim, settings.layers or 1, bases=bases)


def _decoder(tables: LinkTables, settings: LinkSettings) -> Inner | DistMult | ComplEx:
    relations = len(tables.relations)
    name = settings.decoder or ("complex" if tables.form == "directed" else "distmult" if relations else "inner")
    if name not in DECODERS:
        raise ValueError(unknown("decoder", name, DECODERS))
    if name == "inner" and relations:
        raise ValueError(f"inner does not distinguish {relations} relations; choose --decoder distmult or complex")
    if name == "inner":
        return Inner()
    return (DistMult if name == "distmult" else ComplEx)(settings.dim, max(relations, 1))


class LinkRun(Run):
    """A model of links, trained to rank the nodes at their other ends. `graph` holds the links for training, in both
    directions."""

    def __init__(
        self,
        tables: LinkTables,
        steps: int,
        seed: int,
        sizes: LinkSettings,
        *,
        digest: str = "",
        device: str = "cpu",
        precision: Precision = "no",
    ) -> None:
        super().__init__(
            "links",
            EDGES,
            steps,
            seed,
            sizes,
            measure="MRR" if tables.relations else "AUC",
            device=device,
            precision=precision,
            data=digest,
            understood=tables.understood,
        )
        self.tables = tables
        self.sizes = sizes
        self.model: LinkRanker = self.seeded(lambda: link_model(tables, sizes))
        self._popularity = deepcopy(self.model.popularity)
        self.layers = 0 if self.model.encoder is None else layers_of(self.model.encoder)
        self.training = self.training_of(self.model)
        self.graph = self.training.graph

    def trained(self, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> History:
        history = fit_link_ranker(
            self.training,
            self.optimizer(self.sizes.lr),
            steps=self.steps,
            validate_every=max(self.steps // _VALIDATIONS, 1),
            precision=self.precision,
            progress=progress,
            checkpoint=checkpoint,
        )
        self.measured = self.measures(self.training)
        return history

    def inputs(self) -> tuple[Any, ...]:
        pairs, relation = self.training.part("val")
        return self.training.x, pairs, self.graph, relation

    def loss(self) -> Tensor:
        return self.training.loss(0)

    def optimizer(self, rate: float) -> Optimizer:
        popularity = self.model.popularity.weight
        others = [one for one in self.model.parameters() if one is not popularity]
        groups: list[dict[str, Any]] = [{"params": others, "weight_decay": _WEIGHT_DECAY}, {"params": [popularity]}]
        return Adam(groups, lr=rate)

    def error(self) -> float:
        return 1 - self.training.validate()["MRR"]

    def evaluate(self, model: Model) -> str:
        assert isinstance(model, LinkRanker)
        is_measured = model is self.model and bool(self.measured)
        return self._said(self.measured if is_measured else self.measures(self.training_of(model)))

    @property
    def result(self) -> str:
        return f"{self.measured[self._model][self.measure]:.3f}"

    def save(self, folder: Path) -> None:
        tables = self.tables
        folder.mkdir(parents=True, exist_ok=True)
        names = {"ids": tables.ids, "dst_ids": tables.dst_ids, "relations": tables.relations, "inputs": tables.inputs}
        text = json.dumps({**names, "ends": tables.ends, "relation": tables.relation}) + "\n"
        write_atomically(folder / NODES, lambda path: path.write_text(text, encoding="utf-8"))
        super().save(folder)

    @property
    def _model(self) -> str:
        return model_name(self.tables, self.sizes)

    def training_of(self, model: LinkRanker) -> LinkTraining:
        """The links of the run, for a model of its kind."""
        sizes = self.sizes
        fanouts = None if sizes.fanouts is None else fanouts_of(sizes.fanouts)
        split, x = self.tables.split, self.tables.x
        return LinkTraining(model, split, x, batch=sizes.batch, seed=self.seed, fanouts=fanouts)

    def measures(self, training: LinkTraining) -> dict[str, dict[str, float]]:
        """The measures of the model and of popularity, on the test links."""
        popularity = self._popularity
        device = training.graph.device

        def answers(given: Tensor, relation: Tensor, of_src: bool) -> Tensor:
            count = training.model.num_src if of_src else training.model.num_dst
            return popularity.answers(given, relation, torch.arange(count, device=device), of_src=of_src)

        return {
            self._model: link_measures(training, *training.scorers()),
            POPULARITY: link_measures(training, popularity.score, answers),
        }

    def _said(self, measured: Mapping[str, Mapping[str, float]]) -> str:
        """Measures as a table, below what was measured."""
        split = self.tables.split
        kept = "drawn at random" if self.tables.form == "undirected" else "with another destination"
        of = (
            f"{split.test.shape[1]:,} test links, each compared with an absent pair {kept}; ranks leave known links out"
        )
        names = [*measured[POPULARITY]]
        rows = [["", *names], *([name, *(f"{row[m]:.4f}" for m in names)] for name, row in measured.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([of, "", *lines])


def scored_pairs(run: LinkRun, model: LinkRanker, pairs: Pairs) -> Iterator[list[str]]:
    """The header and the rows of the table of predictions: of each pair the score, the probability to be a link rather
    than an absent pair, the rank of the destination among all that have no known link with the source, and the part of
    the run's links that the pair is in."""
    training = run.training_of(model)
    score, answers = training.scorers()
    ends = pairs.pairs.to(training.graph.device)
    relation = torch.zeros_like(ends[0]) if pairs.types is None else pairs.types.to(ends.device)
    scores = score(ends, relation)
    columns = [*pairs.names.T.tolist(), *([] if pairs.relations is None else [pairs.relations.tolist()])]
    columns += [[f"{value:.9g}" for value in scores.tolist()]]
    columns += [[f"{value:.6g}" for value in model.probability(scores).tolist()]]
    ranks = ranks_of(answers, ends[0], relation, ends[1], training.every_known[0])
    columns += [[f"{value:g}" for value in ranks.tolist()]]
    columns += [_parts_of(training, ends, relation)]
    tables = run.tables
    yield [*tables.ends, *([] if tables.relation is None else [tables.relation]), "score", "p", "rank", "known"]
    yield from map(list, zip(*columns, strict=True))


def _parts_of(training: LinkTraining, pairs: Tensor, relation: Tensor) -> list[str]:
    """The part that each pair is a link of, or nothing."""
    names = [""] * pairs.shape[1]
    for part in get_args(Part):
        query, node = training.known(part)[0].of(pairs[0], relation)
        for k in query[node == pairs[1, query]].tolist():
            names[k] = part
    return names
