"""Models of transformers whose tokens are divided over processes, within `mpnn.distributed.sharded`.

Each process calls the model with its own tokens. Hooks of the model, which `use` registers, say the rest: positions in
the whole sequence, the padding of all tokens, and the labels and their number for a loss over all processes. The masks
are those of the whole sequence (masks.py), and `mpnn.ops.attend` takes this process's rows of them.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mpnn.graph.sharding import active
from mpnn.integrations.hf import recurrences

FAMILIES = frozenset({
    "falcon_h1", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama", "mistral", "olmo2", "phi3", "qwen2",
    "qwen3",
})  # fmt: skip
"""The families of which `tests/distributed/test_hf_ranks.py` compares a model with one process."""

_IGNORED = -100  # a label without a loss, in transformers
_CACHES = "past_key_values", "cache_position", "position_ids"


class Whole(NamedTuple):
    """What a pass of a model knows of the whole sequence: the number of tokens, and which of them are not padding,
    bool [B, tokens]."""

    tokens: int
    padding: Tensor


_CURRENT: ContextVar[Whole | None] = ContextVar("whole sequence", default=None)


def current() -> Whole | None:
    """The whole sequence of the pass that runs; None if its tokens are not divided.

    Raises:
        ValueError: if they are, and the model has no hooks.
    """
    whole = _CURRENT.get() if active() is not None else None
    if whole is None and active() is not None:
        raise ValueError(
            "within mpnn.distributed.sharded, this model does not know the positions of its tokens: call "
            "mpnn.hf.use(model), and the model itself rather than a part of it"
        )
    return whole


def divide(model: PreTrainedModel) -> list[Callable[[], Any]]:
    """Registers the hooks; returns what removes them."""
    hooks = [
        model.register_forward_pre_hook(_uncompiled, with_kwargs=True, prepend=True),
        model.register_forward_hook(_leave, always_call=True),
    ]
    return [hook.remove for hook in hooks]


def _uncompiled(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """While tokens are divided, compiled programs break here, at masks and at attention."""
    return None if active() is None else _enter(model, args, options)


@torch.compiler.disable
def _enter(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    sharding = active()
    assert sharding is not None
    parameters = inspect.signature(model.forward).parameters
    options = {**dict(zip(parameters, args, strict=False)), **options}
    _check(model, options)
    x = options["input_ids"] if options.get("input_ids") is not None else options["inputs_embeds"]
    if not x.shape[1]:
        raise ValueError("each process needs at least one token of the sequence")
    sharding.check(model)
    numbers, mask = sharding.numbers(x.shape[1]).to(x.device), options.get("attention_mask")
    if mask is None:  # with it, transformers does not search positions for packed sequences
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    padding = sharding.gather(mask.bool(), 1)
    options |= {"position_ids": numbers[None], "attention_mask": mask, "use_cache": False}
    if options.get("labels") is not None:
        labels = F.pad(sharding.gather(options["labels"], 1), (0, 1), value=_IGNORED)[:, 1:]
        options["shift_labels"] = labels[:, numbers]
        options["num_items_in_batch"] = (labels != _IGNORED).sum() / dist.get_world_size()
    _CURRENT.set(Whole(padding.shape[1], padding))
    return (), options


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    if active() is not None:
        _CURRENT.set(None)


def _check(model: Any, options: dict[str, Any]) -> None:
    """Raises ValueError if a model or a call is not served."""
    name = type(model).__name__
    if model.config.model_type not in FAMILIES or not name.endswith(("ForCausalLM", "LMHeadModel", "Model")):
        raise ValueError(
            f"the tokens of {name} are not divided over processes: nobody tried whether its layers compute on single "
            f"tokens. Served are models and causal language models of {', '.join(sorted(FAMILIES))}"
        )
    if any(map(recurrences.is_foreign, model.modules())):
        raise ValueError(
            f"recurrent layers of {name} run transformers' code, which passes no state from process to process: build "
            "the kernels (mpnn doctor), and call mpnn.hf.use(model) before accelerate adds hooks"
        )
    if any(options.get(name) is not None for name in _CACHES) or options.get("use_cache"):
        raise ValueError(
            "within mpnn.distributed.sharded, a model of transformers has no cache and sets position_ids itself: "
            "generate on one process, or call the model with use_cache=False"
        )
    if options.get("num_items_in_batch") is not None:
        raise ValueError(
            "within mpnn.distributed.sharded, a model counts the labels of all processes itself: pass no "
            "num_items_in_batch; set trainer.model_accepts_loss_kwargs = False of a Trainer"
        )
    mask = options.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise ValueError("within mpnn.distributed.sharded, attention_mask is that of this process's tokens, [B, n]")
