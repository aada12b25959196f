"""Texts packed in a row, in every way in which models of transformers are told, and under every wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hf_walk import tiny
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mpnn.hf

ROOT = Path(__file__).parents[2]

LENGTHS = [5, 1, 7]
IDS = torch.randint(3, 50, (1, 13), generator=torch.Generator().manual_seed(0))
_ENDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
_POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
_TEXTS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None].int()
_FLASH = {"cu_seq_lens_q": _ENDS, "cu_seq_lens_k": _ENDS, "max_length_q": 7, "max_length_k": 7}

WAYS: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": _POSITIONS},
    "seq_idx": {"seq_idx": _TEXTS},
    "cu_seq_lens": _FLASH,
    "all of them": {"position_ids": _POSITIONS, "seq_idx": _TEXTS, **_FLASH},
}
"""What says where the texts begin; the last is what `DataCollatorWithFlattening` returns."""


def model(family: str) -> Any:
    """A tiny decoder, in place."""
    transformers.logging.set_verbosity_error()
    made = tiny(getattr(transformers, family))
    mpnn.hf.use(made)
    return made


def packed(made: Any, way: str, call: Callable[..., Any] | None = None) -> Tensor:
    """The last states or logits [1, 13, D] of the packed texts."""
    out = (made if call is None else call)(input_ids=IDS, use_cache=False, **WAYS[way])
    return out.logits if "logits" in out else out.last_hidden_state


def alone(made: Any, way: str, call: Callable[..., Any] | None = None) -> Tensor:
    """The same of each text alone, one behind the other."""
    outs = []
    for text in IDS.split(LENGTHS, 1):
        positions = {"position_ids": torch.arange(text.shape[1])[None]} if "position_ids" in WAYS[way] else {}
        outs.append((made if call is None else call)(input_ids=text, use_cache=False, **positions))
    return torch.cat([out.logits if "logits" in out else out.last_hidden_state for out in outs], 1)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


# Each returns how far the texts are from what they are alone, and, of training, their gradients.


def plain(made: Any, way: str) -> float:
    with torch.no_grad():
        return difference(packed(made, way), alone(made, way))


def compiled(made: Any, way: str) -> float:
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return difference(packed(made, way, torch.compile(made, backend="eager")), alone(made, way))


def inner(made: Any, way: str) -> float:
    with torch.no_grad():
        return difference(packed(made, way, made.base_model), alone(made, way, made.base_model))


def forward(made: Any, way: str) -> float:
    with torch.no_grad():
        return max(
            difference(packed(made, way, made.forward), alone(made, way)),
            difference(packed(made, way, made.base_model.forward), alone(made, way, made.base_model)),
        )


def autocast(made: Any, way: str) -> float:
    """In bfloat16: how far, in units of its rounding of results that are sums of many roundings."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return difference(packed(made, way).float(), alone(made, way).float()) / 2e3


def peft(made: Any, way: str) -> float:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(made, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    with torch.no_grad():
        return difference(packed(wrapped, way), alone(wrapped, way))


def _gradients(made: Any, run: Callable[[], Tensor]) -> Tensor:
    made.train()
    made.zero_grad()
    run().pow(2).mean().backward()
    gradients = (p.grad for p in made.parameters() if p.grad is not None)
    return torch.cat([(g.to_local() if isinstance(g, DTensor) else g).flatten() for g in gradients])


def training(made: Any, way: str, wrap: Callable[[Any], Any] = lambda made: None) -> float:
    expected = _gradients(made, lambda: alone(made, way))
    wrap(made)
    return difference(_gradients(made, lambda: packed(made, way)), expected)


def _recompute(made: Any, use_reentrant: bool) -> None:
    newer = getattr(made, "activation_checkpointing_enable", None)
    (newer or made.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def checkpointed(made: Any, way: str) -> float:
    return training(made, way, lambda made: _recompute(made, use_reentrant=False))


def checkpointed_reentrant(made: Any, way: str) -> float:
    def wrap(made: Any) -> None:
        made.enable_input_require_grads()
        _recompute(made, use_reentrant=True)

    return training(made, way, wrap)


def checkpoint_wrapped(made: Any, way: str, kind: CheckpointImpl = CheckpointImpl.NO_REENTRANT) -> float:
    """As FSDP and accelerate wrap layers."""
    kinds = set(made._no_split_modules or ())

    def wrap(made: Any) -> None:
        apply_activation_checkpointing(
            made,
            checkpoint_wrapper_fn=lambda layer: checkpoint_wrapper(layer, checkpoint_impl=kind),
            check_fn=lambda layer: type(layer).__name__ in kinds,
        )

    return training(made, way, wrap)


def sharded_by_fsdp(made: Any, way: str) -> float:
    """FSDP's wrapper around each layer and the model, in a group of one process."""
    kinds = set(made._no_split_modules or ())

    def wrap(made: Any) -> None:
        mesh = init_device_mesh("cpu", (1,))
        # layers inside layers first, as FSDP shards a parameter once
        for layer in reversed([layer for layer in made.modules() if type(layer).__name__ in kinds]):
            fully_shard(layer, mesh=mesh)
        fully_shard(made, mesh=mesh)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return training(made, way, wrap)
    finally:
        dist.destroy_process_group()


def compiled_and_checkpointed(made: Any, way: str) -> float:
    torch._dynamo.reset()
    _recompute(made, use_reentrant=False)
    expected = _gradients(made, lambda: alone(made, way))
    program = torch.compile(made, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return difference(_gradients(made, lambda: packed(made, way, program)), expected)


WRAPPERS: dict[str, Callable[[Any, str], float]] = {
    "plain": plain,
    "compiled": compiled,
    "inner model": inner,
    ".forward": forward,
    "autocast": autocast,
    "PEFT": peft,
    "training": training,
    "checkpointed": checkpointed,
    "checkpointed, reentrant": checkpointed_reentrant,
    "checkpoint wrapper": checkpoint_wrapped,
    "FSDP": sharded_by_fsdp,
    "compiled and checkpointed": compiled_and_checkpointed,
}
