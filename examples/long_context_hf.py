"""One long text over several processes, with a model of transformers: a Llama in place, whose tokens are divided.

    torchrun --nproc-per-node 2 examples/long_context_hf.py                     8,192 characters, two processes
    torchrun --nproc-per-node 2 examples/long_context_hf.py --parameters fsdp   parameters divided too (FSDP2)
    python examples/long_context_hf.py --tokens 512 --steps 3                   one process, a quick test

Each process gives the model its own tokens and labels. `mpnn.hf.use` says where they are in the whole text: positions,
masks, and the number of labels of all processes, so that the loss is that of one process. accelerate starts the
processes' group and wraps the model in DDP; FSDP2 is torch's.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from long_context import read
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from mpnn import graphs, hf
from mpnn.data import Characters
from mpnn.distributed import partition, sharded


def main() -> None:
    options = parse()
    accelerator = Accelerator()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    text = read()
    characters = Characters(text)
    corpus = characters.encode(text)
    torch.manual_seed(0)  # the same weights everywhere
    config = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=options.dim,
        intermediate_size=2 * options.dim,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.tokens,
    )
    model = LlamaForCausalLM(config)
    topology = graphs.causal() & graphs.window(options.window)
    hf.use(model, topology)
    part = partition(topology.bind(options.tokens))
    if options.parameters == "fsdp":
        mesh = init_device_mesh(accelerator.device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    else:
        wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    for step in range(options.steps):
        torch.manual_seed(1000 + step)  # the same text everywhere
        start = int(torch.randint(len(corpus) - options.tokens, ()))
        tokens = part.scatter(corpus[None, start : start + options.tokens], -1).to(accelerator.device)
        with sharded(part):
            loss = wrapped(input_ids=tokens, labels=tokens).loss  # labels are shifted over all processes
            optimizer.zero_grad()
            accelerator.backward(loss)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: {float(mean) / dist.get_world_size():.6f} nats a character", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="characters of a text, over all processes")
    parser.add_argument("--window", type=int, default=256, help="characters before it that each one attends to")
    parser.add_argument("--dim", type=int, default=128, help="width, a multiple of 4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--parameters", choices=("ddp", "fsdp"), default="ddp", help="copied or divided")
    return parser.parse_args()


if __name__ == "__main__":
    main()
