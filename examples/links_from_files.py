"""Links from files: MovieLens 100k, split at random and by time, and the knowledge graph UMLS.

Each model is trained as `mpnn train --task links` trains it by default, and compared with two baselines: `popularity`
scores a pair by the number of its training links, and DistMult (Yang et al. 2015) learns a vector of each node, without
messages. The files come with `pip install --no-deps recbole pykeen`.

- MovieLens 100k: 943 users, 1,682 films, 100,000 ratings. The test is a tenth of them, at random or the last ones. The
  measure is the area under the ROC curve (AUC) of the test links and as many pairs of the same user and another film.
- UMLS: 135 medical concepts, 46 relations, 6,529 facts, in the split of Dettmers et al. 2018. The measure is the mean
  reciprocal rank (MRR) of both ends of each test fact among all concepts that are not another known answer.

    python examples/links_from_files.py                                   ten minutes on one core
    python examples/links_from_files.py --seeds 1 --steps 2 --rows 2000   a quick test
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from experiment import Outcome, Row, measure, parser

from mpnn.cli.link_run import POPULARITY, LinkRun, LinkSettings
from mpnn.data import LinkTables, link_tables, locate
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import History, Progress

RATINGS = "ml-100k.inter"
FACTS = {"train.txt": "train", "valid.txt": "val", "test.txt": "test"}
MODELS = {
    "LightGCN": LinkSettings(model="lightgcn"),
    "R-GCN": LinkSettings(model="rgcn"),
    "embeddings": LinkSettings(model="embeddings"),
    "DistMult": LinkSettings(model="embeddings", decoder="distmult"),
    POPULARITY: LinkSettings(),
}


@dataclass(frozen=True)
class Task:
    """Links and their measure. models: the first is compared with the `published` number, which is from `source`."""

    name: str
    models: tuple[str, ...]
    metric: str
    published: str = "none"
    source: str = ""


OF_RATINGS = tuple(MODELS)
TASKS = {
    "random": Task("links from files: MovieLens 100k at random", OF_RATINGS, "AUC"),
    "time": Task("links from files: MovieLens 100k by time", OF_RATINGS, "AUC"),
    "umls": Task(
        "links from files: UMLS",
        tuple(name for name in MODELS if name != "LightGCN"),
        "MRR",
        published="0.94 for ConvE",
        source="README of TimDettmers/ConvE",
    ),
}


def tables(data: str, folder: Path, rows: int | None, seed: int) -> LinkTables:
    """The links of a task. rows: how many of each file are read; None: all."""
    if data == "umls":
        return link_tables(facts(folder / "umls.tsv", rows), relation="relation", seed=seed)
    ratings = locate("movielens-100k", RATINGS) / RATINGS
    if rows is not None:
        first = lines(ratings, rows + 1)
        ratings = folder / RATINGS
        ratings.write_text("\n".join(first), encoding="utf-8")
    time = "timestamp:float" if data == "time" else None
    return link_tables(ratings, columns=["user_id:token", "item_id:token"], time=time, seed=seed)


def facts(path: Path, rows: int | None) -> Path:
    """Writes the three files of UMLS as one, with a column that states the part of each fact."""
    table = ["head\trelation\ttail\tsplit"]
    for file, part in FACTS.items():
        table += [f"{line}\t{part}" for line in lines(locate("umls", file) / file, rows)]
    path.write_text("\n".join(table), encoding="utf-8")
    return path


def lines(path: Path, count: int | None) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line in islice(file, count)]


def train(
    data: str,
    model: str,
    steps: int,
    options: Namespace,
    seed: int,
    progress: Progress,
    checkpoint: Checkpoint,
) -> Outcome:
    links = tables(data, options.out, options.rows, seed)
    run = LinkRun(links, steps, seed, MODELS[model])
    metric = TASKS[data].metric
    if model == POPULARITY:
        return Outcome(History(train_loss=[0.0], seconds=[0.0]), run.measures(run.training)[POPULARITY][metric])
    history = run.fit(progress, checkpoint)
    return Outcome(history, run.measured[str(run.sizes.model)][metric])


def main() -> None:
    command = parser(__doc__, 3, MODELS)
    command.add_argument("--data", nargs="+", choices=list(TASKS), default=list(TASKS), help="which links")
    command.add_argument("--rows", type=int, help="how many rows of each file are read; default: all")
    options = command.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    steps = options.steps or 200
    for data in options.data:
        task = TASKS[data]
        for model in [name for name in task.models if name in options.models]:
            published = (task.published, task.source) if model == task.models[0] else ("none", "")
            row = Row(f"files-{data}-{model.lower()}", task.name, model, task.metric, *published)
            settings = {} if model == POPULARITY else {"steps": steps}
            settings |= {} if options.rows is None else {"rows": options.rows}
            measure(row, partial(train, data, model, steps, options), options, settings)


if __name__ == "__main__":
    main()
