"""One long text over several processes: a GPT over a sliding window, whose tokens are divided over them.

    torchrun --nproc-per-node 2 examples/long_context.py                          16,384 characters, two processes
    torchrun --nproc-per-node 2 examples/long_context.py --parameters fsdp        parameters divided too (FSDP2)
    python examples/long_context.py --tokens 2048 --steps 3                       one process, a quick test

Each process has a block of the tokens and fetches the window's width from its neighbor: `mpnn.distributed.sharded`. The
model is the one of any other example. Parameters are torch's business (DDP or FSDP2), and so are checkpoints
(`torch.distributed.checkpoint`): a run that was killed continues from --checkpoint with the same losses, with any
number of processes. On one machine, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 ... starts killed
processes again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mpnn import graphs
from mpnn.data import Characters, DatasetNotFound, pydoc_topics, tinyshakespeare
from mpnn.distributed import node_mean, partition, sharded
from mpnn.models import GPT


def main() -> None:
    options = parse()
    start_processes()
    rank, device = dist.get_rank(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read()
    characters = Characters(text)
    corpus = characters.encode(text)
    graph = graphs.causal() & graphs.window(options.window)
    torch.manual_seed(0)  # the same weights everywhere
    model = GPT(len(characters), options.dim, 4, options.layers, graph, context=options.tokens, dropout=0.1).to(device)
    wrapped = divided(model, options.parameters)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 3e-4)
    part = partition(graph.bind(options.tokens))
    if rank == 0:
        print(part.explain(options.dim), flush=True)
    first = load(options.checkpoint, wrapped, optimizer)
    for step in range(first, options.steps):
        began = perf_counter()
        torch.manual_seed(1000 + step)  # the same text and dropout everywhere, whatever came before
        start = int(torch.randint(len(corpus) - options.tokens, ()))
        tokens, targets = (corpus[None, start + k : start + k + options.tokens] for k in (0, 1))
        loss = train_step(
            wrapped, optimizer, part.scatter(tokens, -1).to(device), part.scatter(targets, -1).to(device), part
        )
        if rank == 0:
            print(f"step {step + 1}: {loss:.6f} nats a character, {perf_counter() - began:.2f} s", flush=True)
        if options.checkpoint and (step + 1) % options.every == 0:
            save(options.checkpoint, step + 1, wrapped, optimizer)
    dist.barrier()
    dist.destroy_process_group()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, part: object
) -> float:
    """One step on this process's tokens, [1, n]. Returns the loss over all tokens."""
    with sharded(part):
        losses = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
        loss = node_mean(losses)  # DDP and FSDP2 average gradients
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def divided(model: nn.Module, parameters: str) -> nn.Module:
    """The model whose parameters are copied to every process (ddp), or divided over them (fsdp)."""
    if parameters == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes a checkpoint next to the last one, and names it in `latest` once it is whole."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        (folder / "latest.tmp").write_text(str(step))
        os.replace(folder / "latest.tmp", folder / "latest")
    dist.barrier()


def load(folder: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the latest checkpoint, if there is one, and returns the number of steps until it."""
    if folder is None or not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if dist.get_rank() == 0:
        print(f"continues after step {step}", flush=True)
    return step


def start_processes() -> None:
    """Joins the processes that torchrun started, or begins a group of one."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def read() -> str:
    try:
        return tinyshakespeare()
    except DatasetNotFound:
        return pydoc_topics()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="characters of a text, over all processes")
    parser.add_argument("--window", type=int, default=256, help="characters before it that each one attends to")
    parser.add_argument("--dim", type=int, default=128, help="width, a multiple of 4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--parameters", choices=("ddp", "fsdp"), default="ddp", help="copied or divided")
    parser.add_argument("--checkpoint", type=Path, help="folder of checkpoints; an existing one is continued")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
