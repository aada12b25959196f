"""One process of a group: models of transformers in place, whose tokens are divided, against the whole sequence.

    RANK=0 WORLD_SIZE=2 python -m hf_ranks FILE FAMILY ...

FILE is where the processes of a group meet. Prints a line for each model; the exit code is 1 if one disagrees.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from hf_families import tiny
from torch.nn import functional as F
from transformers import FalconH1Config, FalconH1ForCausalLM

from mpnn import graphs, hf
from mpnn.distributed import partition, sharded, sum_gradients

TOKENS = 41
EXACT, SINGLE = 1e-12, 1e-6
ROUNDS = "gemma2", "gemma3", "gpt_oss", "falcon_h1"  # families whose norms or experts compute in float32


def divisions(ranks: int) -> dict[str, Any]:
    causal = graphs.causal().bind(TOKENS)
    return {
        "blocks": partition(causal, balance="nodes", transport="halo"),
        "zigzag": partition(causal, balance="zigzag"),
        "uneven": partition(
            causal, parts=torch.tensor([ranks - 1] * 5 + [*range(ranks)] + [0] * (TOKENS - 5 - ranks)), transport="halo"
        ),
    }


def falcon_h1() -> Any:
    """A hybrid: attention and Mamba-2 side by side in each layer."""
    torch.manual_seed(0)
    config = FalconH1Config(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=48,
        mamba_n_heads=6,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
        pad_token_id=0,
    )
    return FalconH1ForCausalLM(config)


def errors(
    name: str, owners_of: str, graph: str | None = None, padded: bool = False, compiled: bool = False
) -> tuple[float, str]:
    """The largest difference of logits, loss and gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = (falcon_h1() if name == "falcon_h1" else tiny(name)).double()
    model.set_experts_implementation("eager")  # which takes float64
    draw = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(3, 60, (2, TOKENS), generator=draw) for _ in range(2))
    labels[:, 20:23] = -100
    mask = torch.ones_like(tokens)
    if padded:
        mask[:, :4] = 0
    handle = hf.use(model, graph)
    positions = torch.arange(TOKENS)[None]
    expected = model(tokens, attention_mask=mask, position_ids=positions, labels=labels, use_cache=False)
    kept = mask[..., None].bool()
    # transformers computes the loss in float32
    loss = F.cross_entropy(expected.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    part = divisions(ranks)[owners_of]
    mine = part.dst.nodes(rank)
    cut = {"input_ids": tokens, "labels": labels, **({"attention_mask": mask} if padded else {})}
    with sharded(part):
        call = torch.compile(model, backend="eager") if compiled else model
        output = call(**{k: x[:, mine] for k, x in cut.items()})
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        own = F.cross_entropy(output.logits.flatten(0, 1), shifted[:, mine].flatten(), reduction="sum")
        (own / (shifted != -100).sum()).backward()
    sum_gradients(model.parameters())
    differences = {
        "logits": ((output.logits - expected.logits[:, mine]) * kept[:, mine]).abs().max() if len(mine) else 0
    }
    total = output.loss.detach().double().clone()
    dist.all_reduce(total)
    assert abs(float(total.detach()) / ranks - float(loss.detach())) < 1e-5
    for n, p in model.named_parameters():
        if n in gradients:
            differences[n] = (p.grad - gradients[n]).abs().max() / gradients[n].abs().max().clamp(min=1e-3)
    handle.restore()
    where = max(differences, key=lambda n: float(differences[n]))
    return float(differences[where]), where


def main() -> None:
    meeting, *names = sys.argv[1:]
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    failed = False
    for name in names:
        cases = [(name, "blocks")] if name == "falcon_h1" else [(name, "blocks"), (name, "zigzag"), (name, "uneven")]
        if name == "qwen3":
            cases += [(name, "zigzag", None, False, True)]
        if name == "llama":
            cases += [(name, "zigzag", "causal() & window(6)"), (name, "zigzag", None, True)]
        for case in cases:
            try:
                error, where = errors(*case)
            except Exception:
                traceback.print_exc()
                print(f"FAILED {case}", flush=True)
                os._exit(1)  # the others would wait
            wrong = not error <= (SINGLE if name in ROUNDS else EXACT)
            failed |= wrong
            print(f"{'WRONG ' if wrong else ''}{error:.1e} {case} ({where})", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
