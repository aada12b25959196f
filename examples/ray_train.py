"""One long text over the workers of Ray Train, which starts the processes instead of torchrun.

    python examples/ray_train.py                          two workers; needs ray[train]
    python examples/ray_train.py --workers 1 --tokens 256 --steps 2      a quick test

Ray starts the workers and makes them one process group. The rest is as in examples/long_context.py: each worker has a
block of the tokens, and `mpnn.distributed.sharded` fetches what its window needs from its neighbor.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mpnn import graphs
from mpnn.data import Characters, pydoc_topics
from mpnn.distributed import node_mean, partition, sharded
from mpnn.models import GPT


def work(options: dict[str, Any]) -> None:
    """Runs in each worker, after Ray has initialized its process group."""
    from ray import train

    text = pydoc_topics()
    characters = Characters(text)
    corpus, tokens = characters.encode(text), options["tokens"]
    graph = graphs.causal() & graphs.window(64)
    torch.manual_seed(0)  # the same weights everywhere
    model = DistributedDataParallel(GPT(len(characters), 64, 4, 2, graph, context=tokens, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    part = partition(graph.bind(tokens))
    for step in range(options["steps"]):
        torch.manual_seed(1000 + step)  # the same text and dropout everywhere
        start = int(torch.randint(len(corpus) - tokens, ()))
        mine, wanted = (part.scatter(corpus[None, start + k : start + k + tokens], -1) for k in (0, 1))
        with sharded(part):
            losses = F.cross_entropy(model(mine).transpose(1, 2), wanted, reduction="none")
            loss = node_mean(losses)  # DDP averages gradients
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
    # Ray keeps metrics that come with a checkpoint
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.module.state_dict(), Path(folder) / "model.pt")
        saved = train.Checkpoint.from_directory(folder) if part.rank == 0 else None
        train.report({"step": options["steps"], "loss": float(mean) / part.ranks}, checkpoint=saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="characters of a text, over all workers")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    # --help needs no Ray
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        work,
        train_loop_config={"tokens": options.tokens, "steps": options.steps},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="mpnn"),
    )
    last = trainer.fit().metrics or {}
    print(f"{options.workers} workers, step {last['step']}: {last['loss']:.6f} nats a character")


if __name__ == "__main__":
    main()
