"""Training of `mpnn.models.LinkRanker`, and the measures of link prediction and of ranking."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from mpnn import Graph
from mpnn.data.link_batches import LinkNeighbors
from mpnn.data.links import LinkSplit
from mpnn.data.neighbors import checked_fanouts
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import History, Precision, Progress, Settings, fit, shuffled

HITS = (1, 3, 10)
_ASKED = 0.2  # of the links for training, at most: messages pass along the others
_CANDIDATES = 4096  # nodes that are ranked in training; of more, a sample is
_SAMPLE = 2048
_AT_ONCE = 512  # queries that are ranked
_QUICK = 2000  # queries of a validation during training
Part = Literal["train", "val", "test"]
Score = Callable[[Tensor, Tensor], Tensor]
"""Scores [P] of pairs [2, P] of types [P]."""
Answers = Callable[[Tensor, Tensor, bool], Tensor]
"""Scores [Q, C] of all C nodes as the other end of links of types [Q] of nodes [Q]: destinations of sources, or, if the
last argument is True, sources of destinations."""


class Queries(NamedTuple):
    """Which node is at the other end of a link of this type [Q] of this node [Q]? Each has one `answer` [Q]."""

    given: Tensor
    relation: Tensor
    answer: Tensor
    of_src: bool


def queries(form: str, pairs: Tensor, relation: Tensor) -> list[Queries]:
    """Returns the queries about links [2, L] of types [L], of a `form` of `LinkRanker`: the destinations of sources,
    and of directed links the sources of destinations too. Both ends of an undirected link are sources."""
    src, dst = pairs
    if form == "undirected":
        return [Queries(torch.cat([src, dst]), relation.repeat(2), torch.cat([dst, src]), False)]
    asked = [Queries(src, relation, dst, False)]
    return [*asked, Queries(dst, relation, src, True)] if form == "directed" else asked


class KnownAnswers:
    """The known answers of queries. Ranks are filtered by them, and training takes none for wrong."""

    def __init__(self, known: Queries, relations: int) -> None:
        self.relations = relations
        key, order = self._key(known.given, known.relation).sort(stable=True)
        self.keys, counts = key.unique_consecutive(return_counts=True)
        self.starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.answer = known.answer[order]

    def of(self, given: Tensor, relation: Tensor) -> tuple[Tensor, Tensor]:
        """Of queries [Q]: the index of the query and the node, for each known answer [K]."""
        key = self._key(given, relation)
        place = torch.searchsorted(self.keys, key).clamp(max=len(self.keys) - 1)
        begin = self.starts[place]
        count = torch.where(self.keys[place] == key, self.starts[place + 1] - begin, 0)
        query = torch.arange(len(key), device=key.device).repeat_interleave(count)
        within = torch.arange(len(query), device=key.device) - (count.cumsum(0) - count)[query]
        return query, self.answer[begin[query] + within]

    def _key(self, given: Tensor, relation: Tensor) -> Tensor:
        return given * self.relations + relation


class LinkTraining:
    """Trains a `LinkRanker` on the training part of links, and ranks those of the others.

    A step asks for some links: for each, the loss is the cross-entropy of its end among all nodes that are not known to
    be linked (a sample of them, of many nodes). Messages pass along the links that the step does not ask for: with its
    own answer among the edges, a model would learn to look it up.

    Args:
        model: on one device.
        links: see `mpnn.data.split_links`; of a graph with edge types with the types.
        x: features of the nodes [N, in_dim], or None.
        batch: links that a step asks for; at most a fifth of all, if the model has an encoder.
        seed: of the order of the links, and of the samples.
        fanouts: the number of in-neighbors that each layer of the encoder receives from in a step, -1 for all of them.
            A step then costs memory and time for the sampled neighbors of the nodes that it ranks, not for all links.
            Messages are weighted so that their sums are expected to be those over all in-neighbors. Default: every
            step computes the whole graph. Measures do so always.

    Raises:
        ValueError: there are fanouts and no encoder, or not one for each of its layers.
    """

    def __init__(
        self,
        model: Any,
        links: LinkSplit,
        x: Tensor | None = None,
        *,
        batch: int = 4096,
        seed: int = 0,
        fanouts: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        device = model.own.device
        self.x = None if x is None else x.to(device)
        self.seed = seed
        self._parts = {name: (getattr(links, name).to(device), links.types(name).to(device)) for name in get_args(Part)}
        self._absent = {"val": links.val_absent.to(device), "test": links.test_absent.to(device)}
        pairs, relation = self.part("train")
        self.count = pairs.shape[1]
        most = max(1, min(batch, int(_ASKED * self.count) if model.encoder is not None else self.count))
        self.asked = -(-self.count // -(-self.count // most))  # batches of nearly one size
        self.graph = model.graph(pairs, relation)
        self._neighbors = None if fanouts is None else _neighbors(model, self.graph, fanouts, x)
        self._known = self.known("train")
        self.every_known = self.known("train", "val", "test")

    def part(self, name: Part) -> tuple[Tensor, Tensor]:
        """The links of a part [2, L] and their types [L]."""
        return self._parts[name]

    def absent(self, name: Literal["val", "test"]) -> tuple[Tensor, Tensor]:
        """The absent pairs of a part, and the types that they stand for."""
        return self._absent[name], self._parts[name][1]

    def known(self, *parts: Part) -> list[KnownAnswers]:
        """The answers in these parts, for each kind of `queries`."""
        pairs = torch.cat([self.part(name)[0] for name in parts], 1)
        relation = torch.cat([self.part(name)[1] for name in parts])
        return [KnownAnswers(asked, self.model.relations) for asked in queries(self.model.form, pairs, relation)]

    def loss(self, k: int) -> Tensor:
        """The loss of step k."""
        pairs, relation = self.part("train")
        chosen = shuffled(self.count, self.asked, k, self.seed).to(pairs.device)
        asked = queries(self.model.form, pairs[:, chosen], relation[chosen])
        samples = [candidates(self.model, one) for one in asked]
        z = self._encoded(chosen) if self._neighbors is None else self._sampled(self._neighbors, chosen, samples, k)
        each = zip(asked, self._known, samples, strict=True)
        return torch.stack([ranking_loss(self.model, z, one, known, sample) for one, known, sample in each]).mean()

    def _encoded(self, chosen: Tensor) -> Tensor:
        """z [N, dim] of all nodes, from the links for training that are not chosen."""
        graph = self.graph
        if self.model.encoder is not None:
            pairs, relation = self.part("train")
            rest = torch.ones(self.count, dtype=torch.bool, device=pairs.device).index_fill(0, chosen, False)
            graph = self.model.graph(pairs[:, rest], relation[rest])
        return self.model.encode(graph, self.x)

    def _sampled(self, neighbors: LinkNeighbors, chosen: Tensor, samples: Sequence[Tensor | None], k: int) -> Tensor:
        """z [N, dim], zero but for the ends of the chosen links and the nodes that they are ranked among."""
        first_dst = self.model.first_dst
        ends = self.part("train")[0][:, chosen].cpu() + torch.tensor([[0], [first_dst]])
        every = torch.arange(first_dst, self.graph.num_dst)
        ranked = [every if sample is None else sample.cpu() + first_dst for sample in samples]
        batch = neighbors.sample(torch.cat([ends.flatten(), *ranked]).unique(), ends, self.seed + k)
        graphs = [weighted_for_all(graph).to(self.graph.device) for graph in batch.graphs]
        x = None if batch.x is None else batch.x.to(self.graph.device)
        z = self.model.encode_sampled(graphs, batch.sources.to(self.graph.device), x)
        return z.new_zeros(self.graph.num_dst, z.shape[1]).index_copy(0, batch.nodes.to(z.device), z)

    def validate(self) -> dict[str, float]:
        """The mean reciprocal rank of links of the validation, or of some of them."""
        _, answers = self.scorers()
        return {"MRR": (1 / filtered_ranks(self, "val", answers, most=_QUICK)).mean().item()}

    @torch.no_grad()
    def scorers(self) -> tuple[Score, Answers]:
        """Returns the scores of pairs and of queries by the model, from all links for training."""
        model = self.model.eval()
        z = model.encode(self.graph, self.x)
        return (
            lambda pairs, relation: model.score(z, pairs, relation),
            lambda given, relation, of_src: model.answers(z, given, relation, of_src=of_src),
        )


def fit_link_ranker(
    training: LinkTraining,
    optimizer: Optimizer,
    *,
    steps: int = 300,
    validate_every: int = 20,
    precision: Precision = "no",
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Trains the model of `training`, which gets the weights of the validation with the highest MRR. Its
    probabilities are calibrated on the validation.

    Raises:
        TrainingDiverged, CheckpointError, OSError: as `mpnn.train.loop.fit`.
    """
    if checkpoint is not None:
        checkpoint.describe(links=training.count, optimizer=" ".join(repr(optimizer).split()))
    history = fit(
        training.model,
        optimizer,
        training.loss,
        Settings(
            steps,
            rate=lambda step: 1 - step / steps,
            precision=precision,
            validate_every=validate_every,
            keep="best",
        ),
        validate=training.validate,
        progress=progress,
        checkpoint=checkpoint,
    )
    score, _ = training.scorers()
    training.model.calibrate(*calibration(score(*training.part("val")), score(*training.absent("val"))))
    return history


def candidates(model: Any, asked: Queries) -> Tensor | None:
    """The nodes that answers are ranked among in training: a sample, or None for all, if there are few."""
    count = model.num_src if asked.of_src else model.num_dst
    return torch.randint(count, (_SAMPLE,)).to(asked.given.device).unique() if count > _CANDIDATES else None


def ranking_loss(model: Any, z: Tensor, asked: Queries, known: KnownAnswers, sample: Tensor | None = None) -> Tensor:
    """The mean cross-entropy in nats of the answers, among the nodes that are no other known answer of the query, or
    among a sample of them."""
    query, node = known.of(asked.given, asked.relation)
    is_other = node != asked.answer[query]
    query, node = query[is_other], node[is_other]
    if sample is None:
        scores = model.answers(z, asked.given, asked.relation, of_src=asked.of_src)
        return F.cross_entropy(scores.index_put_((query, node), scores.new_tensor(-torch.inf)), asked.answer)
    count = model.num_src if asked.of_src else model.num_dst
    others, place = torch.cat([sample, asked.answer]).unique(return_inverse=True)
    scores = model.answers(z, asked.given, asked.relation, of_src=asked.of_src, others=others)
    known_place = torch.searchsorted(others, node).clamp(max=len(others) - 1)
    is_there = others[known_place] == node
    scores.index_put_((query[is_there], known_place[is_there]), scores.new_tensor(-torch.inf))
    own = scores.gather(1, place[len(sample) :, None])
    # Each node of the sample stands for as many as there are nodes for one of the sample.
    of_sample = scores.index_select(1, place[: len(sample)]) + scores.new_tensor(count / len(sample)).log()
    of_sample = of_sample.masked_fill(sample == asked.answer[:, None], -torch.inf)
    return F.cross_entropy(torch.cat([own, of_sample], 1), torch.zeros_like(asked.answer))


def _neighbors(model: Any, graph: Graph, fanouts: Sequence[int], x: Tensor | None) -> LinkNeighbors:
    """Returns the sampler around links for the encoder of a model."""
    if model.encoder is None:
        raise ValueError("fanouts are numbers of in-neighbors that send messages, and this model passes none")
    if len(fanouts) != (count := layers_of(model.encoder)):
        raise ValueError(f"fanouts have a number for each of the {count} layers of the encoder; got {len(fanouts)}")
    return LinkNeighbors(graph, checked_fanouts(fanouts), None if x is None else x.cpu())


def layers_of(encoder: Any) -> int:
    """The number of hops that messages make in an encoder."""
    return encoder.layers if isinstance(encoder.layers, int) else len(encoder.layers)


def weighted_for_all(graph: Graph) -> Graph:
    """A sampled graph whose sums weighted by degree are expected to be those over all in-neighbors: a message weighs
    1 / sqrt(d_i d_j), times d_i over the number of sampled in-neighbors."""
    assert graph.degrees is not None
    of_dst, of_src = graph.degrees
    graph.degrees = graph.degree().square() / of_dst.clamp(min=1), of_src
    return graph


# ----------------------------------------------------------------------------------------------------------- measures


@torch.no_grad()
def filtered_ranks(training: LinkTraining, part: Part, answers: Answers, *, most: int | None = None) -> Tensor:
    """The rank of the answer of each query about a part [Q], 1 at best, among the nodes that are no other answer in any
    part (Bordes et al. 2013). Equal scores count as half before it and half after.

    most: the number of queries of each kind that are ranked, evenly spaced among all.
    """
    ranks = []
    for asked, those in zip(queries(training.model.form, *training.part(part)), training.every_known, strict=True):
        count = len(asked.given)
        chosen = torch.arange(count) if most is None or count <= most else torch.linspace(0, count - 1, most).long()
        given, relation, answer = (x[chosen.to(x.device)] for x in (asked.given, asked.relation, asked.answer))
        ranks.append(ranks_of(answers, given, relation, answer, those, of_src=asked.of_src))
    return torch.cat(ranks)


@torch.no_grad()
def ranks_of(
    answers: Answers, given: Tensor, relation: Tensor, answer: Tensor, known: KnownAnswers, *, of_src: bool = False
) -> Tensor:
    """The ranks [Q] of these answers [Q], as `filtered_ranks` has them."""
    ranks = []
    for some in torch.arange(len(given), device=given.device).split(_AT_ONCE):
        scores = answers(given[some], relation[some], of_src)
        own = scores.gather(1, answer[some, None])
        scores.index_put_(known.of(given[some], relation[some]), scores.new_tensor(-torch.inf))
        scores.scatter_(1, answer[some, None], -torch.inf)
        ranks.append(1 + (scores > own).sum(1) + (scores == own).sum(1) / 2)
    return torch.cat(ranks)


@torch.no_grad()
def link_measures(
    training: LinkTraining, score: Score, answers: Answers, part: Literal["val", "test"] = "test"
) -> dict[str, float]:
    """How good the scores of held-out links are.

    Returns:
        "AUC" and "average precision" of the links against the absent pairs of the part, by scikit-learn; "MRR" and
        "Hits@1", "Hits@3", "Hits@10": the mean of 1 / rank, and the share of ranks up to k, of `filtered_ranks`.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    scores, is_link = _as_arrays(score(*training.part(part)), score(*training.absent(part)))
    ranks = filtered_ranks(training, part, answers)
    return {
        "AUC": float(roc_auc_score(is_link, scores)),
        "average precision": float(average_precision_score(is_link, scores)),
        "MRR": (1 / ranks).mean().item(),
        **{f"Hits@{k}": (ranks <= k).double().mean().item() for k in HITS},
    }


def calibration(links: Tensor, absent: Tensor) -> tuple[float, float]:
    """The scale and shift that turn scores into the logarithm of the odds of a link, of as many links [L] as absent
    pairs [L] (Platt 1999). The scale is 0 or more, so that the order stays."""
    from sklearn.linear_model import LogisticRegression

    scores, is_link = _as_arrays(links, absent)
    mean, std = scores.mean(), max(scores.std(), 1e-9)
    fitted = LogisticRegression().fit((scores[:, None] - mean) / std, is_link)
    scale = max(float(fitted.coef_[0, 0]), 0.0)
    return scale / std, float(fitted.intercept_[0]) - scale * mean / std


def _as_arrays(links: Tensor, absent: Tensor) -> tuple[Any, Any]:
    """Scores and whether each is that of a link, for scikit-learn."""
    is_link = torch.cat([torch.ones(len(links)), torch.zeros(len(absent))])
    return torch.cat([links, absent]).detach().double().cpu().numpy(), is_link.numpy()
