"""Models of transformers whose tokens are divided over processes, within `mpnn.distributed.sharded`.

Each process calls the model with its own tokens. Hooks of the model, which `use` registers, say the rest: positions in
the whole sequence, the padding of all tokens, and the labels and their number for a loss over all processes. The masks
are those of the whole sequence (masks.py), and `mpnn.ops.attend` takes this process's rows of them.

With a cache (`generate`), all processes are given the same tokens. The first pass divides them, and each process keeps
the keys and values of its own (`Shares`). Later tokens are computed by all, and kept by one.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from mpnn import Graph, ops
from mpnn.graph.sharding import Sharding, active, use
from mpnn.integrations.hf import compat, recurrences

FAMILIES = frozenset({
    "falcon_h1", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama", "mistral", "olmo2", "phi3", "qwen2",
    "qwen3",
})  # fmt: skip
"""The families of which `tests/distributed/test_hf_ranks.py` compares a model with one process."""

_IGNORED = -100  # a label without a loss, in transformers


class Shares(DynamicCache):
    """The keys and values of this process's tokens, in the layers of `given`, which has none yet.

    mine: the numbers of these tokens in the whole sequence, int64 ascending. counts: how many each process has.
    """

    def __init__(self, given: DynamicCache, sharding: Sharding, tokens: int) -> None:
        super().__init__()
        vars(self).update(vars(given))
        numbers = sharding.split(tokens)
        self.sharding = sharding
        self.tokens = tokens
        self.mine = numbers[sharding.rank]
        self.counts = [len(each) for each in numbers]
        self.keeper = sharding.rank
        if not all(self.counts):
            raise ValueError(f"each process needs at least one token of the prompt; got {tokens} for {len(numbers)}")
        self.last = max(range(len(numbers)), key=lambda rank: int(numbers[rank][-1]))  # who has the last token
        self.parts: dict[tuple[Graph, int], Graph] = {}

    def append(self, count: int) -> Tensor:
        """Begins a pass over new tokens, which the process with the fewest keeps. Returns their numbers."""
        new = torch.arange(self.tokens, self.tokens + count)
        self.keeper = self.counts.index(min(self.counts))
        self.counts[self.keeper] += count
        if self.keeper == self.sharding.rank:
            self.mine = torch.cat([self.mine, new])
        self.tokens = self.tokens + count
        self.last = 0
        self.parts = {}
        return new

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if active() is None:
            raise ValueError("this cache is divided over processes: go on within mpnn.distributed.sharded")
        if self.keeper == self.sharding.rank:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        return layer.keys, layer.values

    def attend(self, graph: Graph, query: Tensor, key: Tensor, value: Tensor, sinks: Any, **options: Any) -> Tensor:
        """Attention of new tokens to those of all processes, over a graph of all. Results over each one's keys, the
        last of its own, are merged by their log-sum-exp."""
        part = graph, key.shape[-3]
        if part not in self.parts:
            self.parts[part] = graph.columns(self.mine[len(self.mine) - key.shape[-3] :])
        with use(None):
            out, lse = ops.attend(self.parts[part], query, key, value, return_lse=True, **options)
        every = self.sharding.all_gather(torch.cat([out.to(lse.dtype), lse[..., None]], -1))
        results = [(each[..., :-1], each[..., -1]) for each in every]
        if sinks is not None:
            results.append((torch.zeros_like(results[0][0]), sinks.to(lse.dtype).expand_as(lse)))
        return ops.merge(results)[0].to(out.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens of all processes."""
        return self.tokens

    def crop(self, *args: Any) -> None:
        raise ValueError("a cache divided over processes is not cropped: assisted decoding runs on one process")


class Whole(NamedTuple):
    """The whole sequence of a pass of a model: the number of tokens, how many are new, which of them are not
    padding, bool [B, tokens], or None if all, and the cache."""

    tokens: int
    new: int
    padding: Tensor | None
    shares: Shares | None = None


_CURRENT: ContextVar[Whole | None] = ContextVar("whole sequence", default=None)


def current() -> Whole | None:
    """The whole sequence of the pass that runs; None if its tokens are not divided.

    Raises:
        ValueError: if they are, and the model has no hooks.
    """
    if active() is None:
        return None
    whole = _CURRENT.get()
    if whole is None:
        raise ValueError(
            "within mpnn.distributed.sharded, this model does not know the positions of its tokens: call "
            "mpnn.hf.use(model), and the model itself rather than a part of it"
        )
    return whole


def shares() -> Shares | None:
    """The cache, in a pass over new tokens. None in others, and while a backward pass computes layers again."""
    whole = _CURRENT.get()
    return whole.shares if whole is not None and whole.new < whole.tokens else None


def divide(model: PreTrainedModel) -> list[Callable[[], Any]]:
    """Registers the hooks, unless the model has them; returns what removes them."""
    if _uncompiled in model._forward_pre_hooks.values():
        return []
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
    if options.get("use_cache") or options.get("past_key_values") is not None:
        return (), options | _cached(model, sharding, options, x)
    if options.get("position_ids") is not None:
        raise ValueError("within mpnn.distributed.sharded, a model of transformers sets position_ids itself: pass none")
    numbers = sharding.numbers(x.shape[1]).to(x.device)
    mask = options.get("attention_mask")
    if mask is None:  # with it, transformers does not search positions for packed sequences
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    padding = sharding.gather(mask.bool(), 1)
    options |= {"position_ids": numbers[None], "attention_mask": mask, "use_cache": False}
    if options.get("labels") is not None:
        labels = F.pad(sharding.gather(options["labels"], 1), (0, 1), value=_IGNORED)[:, 1:]
        options["shift_labels"] = labels[:, numbers]
        options["num_items_in_batch"] = (labels != _IGNORED).sum() / sharding.ranks
    _CURRENT.set(Whole(padding.shape[1], padding.shape[1], padding))
    return (), options


def _cached(model: Any, sharding: Sharding, options: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """The options of a pass with a cache, whose new tokens x [B, n] or [B, n, dim] all processes are given."""
    cache = options.get("past_key_values")
    count = x.shape[1]
    before = cache.tokens if isinstance(cache, Shares) else 0
    _check_cached(model, options, before, count)
    bits = crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    facts = sharding.all_gather(torch.tensor([before, count, bits]))
    if bool((facts != facts[0]).any()):
        raise ValueError("with a cache, all processes are given the same tokens, those of the whole sequence")
    if isinstance(cache, Shares):
        numbers = cache.append(count)
    else:
        cache = Shares(DynamicCache(config=model.config) if cache is None else cache, sharding, count)
        numbers = cache.mine
        generator: Any = torch.cuda if x.is_cuda else torch
        generator.set_rng_state(sharding.all_gather(generator.get_rng_state())[0])  # so that all draw the same tokens
    _CURRENT.set(Whole(cache.tokens, count, None, cache))
    mine = x[:, (numbers - before).to(x.device)]
    return {
        "input_ids" if options.get("input_ids") is not None else "inputs_embeds": mine,
        "position_ids": numbers.to(x.device)[None],
        "attention_mask": torch.ones(mine.shape[:2], dtype=torch.bool, device=x.device),
        "past_key_values": cache,
        "use_cache": True,
        "return_dict": True,
    }


def _leave(model: nn.Module, args: Any, output: Any) -> Any:
    """With a cache, all processes get the logits of one: those of new tokens, or of the last token of a prompt."""
    if active() is None:
        return None
    whole = _CURRENT.get()
    _CURRENT.set(None)
    if output is not None and whole is not None and whole.shares is not None and "logits" in output:
        logits = output.logits if whole.new < whole.tokens else output.logits[:, -1:]
        output["logits"] = whole.shares.sharding.broadcast(logits, whole.shares.last)
    return output


def _check(model: Any, options: dict[str, Any]) -> None:
    """Raises ValueError if a model or a call is not served."""
    name = type(model).__name__
    is_served = model.config.model_type in FAMILIES and name.endswith(("ForCausalLM", "LMHeadModel", "Model"))
    kind = _scaled_by_length(model)
    mask = options.get("attention_mask")
    compat.refuse(
        {
            f"the tokens of {name} are not divided over processes: it is not tested that its layers compute on single "
            f"tokens. Served are models and causal language models of {', '.join(sorted(FAMILIES))}": not is_served,
            f"recurrent layers of {name} run transformers' code, which passes no state from process to process: build "
            "the kernels (mpnn doctor), and call mpnn.hf.use(model) before accelerate adds hooks": (
                any(map(recurrences.is_foreign, model.modules()))
            ),
            f"rotary positions of {name} are scaled by the longest one (rope_type={kind!r}), and each process has its "
            "own: call it outside of mpnn.distributed.sharded": kind,
            "within mpnn.distributed.sharded, a model counts the labels of all processes itself: pass no "
            "num_items_in_batch; set trainer.model_accepts_loss_kwargs = False of a Trainer": (
                options.get("num_items_in_batch") is not None
            ),
            "within mpnn.distributed.sharded, attention_mask is that of this process's tokens, [B, n]": (
                mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2)
            ),
        }
    )


def _scaled_by_length(model: nn.Module) -> str | None:
    """The type of rotary positions whose frequencies depend on the longest position, if the model has such."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", ())
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if "dynamic" in kind or "longrope" in kind:
                return str(kind)
    return None


def _check_cached(model: Any, options: dict[str, Any], before: int, count: int) -> None:
    """Raises ValueError if a forward pass with a cache of `before` tokens is not supported."""
    cache, mask, positions = (options.get(name) for name in ("past_key_values", "attention_mask", "position_ids"))
    keep = options.get("logits_to_keep")
    is_other = positions is not None and bool((positions.cpu() != torch.arange(before, before + count)).any())
    within = "with a cache, within mpnn.distributed.sharded, "
    compat.refuse(
        {
            f"{within}{type(model).__name__} does not run, since it has recurrent layers: generate on one process": (
                any(map(recurrences.runs_here, model.modules()))
            ),
            f"{within}a model has no gradients, dropout or loss: take model.eval(), torch.no_grad(), no labels; or no "
            "cache": torch.is_grad_enabled() or model.training or options.get("labels") is not None,
            f"{within}the first pass takes an empty DynamicCache, or none, and later ones the past_key_values that it "
            "returned": (
                type(cache) not in (type(None), Shares) and (type(cache) is not DynamicCache or cache.get_seq_length())
            ),
            f"{within}a model returns the logits of the last token by name: pass neither logits_to_keep nor "
            "return_dict": (
                isinstance(keep, Tensor) or keep not in (None, 0, 1) or options.get("return_dict") is False
            ),
            f"{within}tokens are numbered from 0, without padding: generate from prompts of equal lengths, or one by "
            "one": ((mask is not None and not mask.all()) or is_other),
        }
    )
