"""The parts of transformers beyond its public interface that this integration needs, checked at import."""

import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

TESTED = "5.23"
VERSION = transformers.__version__
IS_OLDER = tuple(map(int, VERSION.split(".")[:2])) < tuple(map(int, TESTED.split(".")))

_ADVICE = (
    f"mpnn.hf was tested with transformers {TESTED}, and transformers {transformers.__version__} is installed, which "
    f"lacks {{}}; run: pip install transformers=={TESTED}.*"
)

try:
    from transformers.cache_utils import DynamicCache, DynamicLayer
    from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
    from transformers.masking_utils import (
        bidirectional_mask_function as bidirectional_mask_function,
        causal_mask_function as causal_mask_function,
        prepare_padding_mask as prepare_padding_mask,
        sdpa_mask as sdpa_mask,
    )
    from transformers.utils import output_capturing
    from transformers.utils.output_capturing import _active_collector
except ImportError as error:
    raise ImportError(_ADVICE.format(error)) from error

MASKS = causal_mask_function.__module__
"""The module whose mask functions are recognised by name."""

METHODS = {
    "Attention": ["_attn"],
    "XLNetRelativeAttention": ["rel_attn_core", "rel_shift_bnij"],
    "BigBirdAttention": ["set_attention_type"],
    "BloomAttention": ["_reshape"],
    "FalconAttention": ["_split_heads"],
    "GPTJAttention": ["_get_embed_positions", "_merge_heads", "_split_heads"],
    "MPNetEncoder": ["compute_position_bias", "relative_position_bucket"],
    "BigBirdBlockSparseAttention": [
        "_bigbird_block_rand_mask", "_bigbird_block_rand_mask_with_head", "_get_rand_attn_plan",
    ],
    "LSHSelfAttention": [
        "_get_sorted_bucket_idx_and_undo_sorted_bucket_idx", "_hash_vectors", "_len_and_dim_norm", "_set_num_buckets",
    ],
}  # fmt: skip
"""By class: the methods of attention layers that `native` calls or overrides, and checks when it is imported."""

INTERNAL = "_attn_implementation_internal"
"""The attribute of a configuration that holds the name of its attention."""

_DISPATCHER = "ALL_ATTENTION_FUNCTIONS"


def check(owner: Any, names: Iterable[str]) -> None:
    """Raises ImportError if a class or module of transformers lacks one of the names."""
    for name in names:
        if not hasattr(owner, name):
            raise ImportError(_ADVICE.format(f"{owner.__name__}.{name}"))


def refuse(reasons: Mapping[str, Any]) -> None:
    """Raises ValueError with the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)


check(PretrainedConfig, ["_attn_implementation", "get_text_config"])
check(PreTrainedModel, ["get_correct_attn_implementation", "set_attn_implementation"])
check(transformers.modeling_utils, [_DISPATCHER])


def dense_mask(
    batch: int,
    sizes: Sequence[int],
    function: Any,
    padding: Tensor | None = None,
    *,
    use_vmap: bool = False,
    device: Any = None,
) -> Tensor:
    """The pairs that a mask function and padding allow, bool [B, 1, queries, keys]. sizes: the numbers of queries and
    keys, and their first positions."""
    options = {"allow_is_causal_skip": False, "use_vmap": use_vmap, "device": device or "cpu"}
    allowed = sdpa_mask(batch, *sizes, function, padding, **options)  # type: ignore[arg-type, call-arg]
    assert allowed is not None  # None would be a mask that transformers skips
    return allowed


def warn_without_attention(name: str) -> None:
    """Makes transformers warn where a model without attention layers is created with this `attn_implementation`, which
    it would accept without a word."""
    owner: Any = PreTrainedModel
    check = owner.get_correct_attn_implementation
    if hasattr(check, "__wrapped__"):
        return

    @wraps(check)
    def checked(model: Any, requested_attention: str | None, *args: Any, **options: Any) -> Any:
        if requested_attention == name and has_no_attention(type(model)):
            warnings.warn(
                f"{type(model).__name__} has no attention layers, so attn_implementation={name!r} changes nothing; "
                "mpnn.hf.use(model) runs recurrent layers, if it has any, by mpnn",
                stacklevel=3,
            )
        return check(model, requested_attention, *args, **options)

    owner.get_correct_attn_implementation = checked


def has_no_attention(kind: type) -> bool:
    """Whether a family's module has no attention, and contains no other models."""
    names = vars(sys.modules[kind.__module__])
    own = (name for name in names if name != "create_recurrent_attention_mask")
    return not any(name.startswith("Auto") or "attention" in name.lower() for name in own)


def dispatches(module: nn.Module) -> bool:
    """Whether this is an attention layer that calls the function registered under that name."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _DISPATCHER in code.co_names


def functions(attention: nn.Module) -> Any:
    """Where an attention layer looks its function up."""
    return inspect.unwrap(type(attention).forward).__globals__[_DISPATCHER]


def collects_attentions() -> bool:
    """Whether the model that runs was called with `output_attentions=True`, which GPT-2 does not pass to its layers."""
    return "attentions" in (_active_collector.get() or ())


def collects_only(name: str) -> bool:
    """Whether the model that runs collects nothing from its layers but what has this name."""
    for other in _active_collector.get() or ():  # noqa: SIM110  # a call fewer for each layer
        if other != name and not other.startswith("_"):
            return False
    return True


def has_only_idle_hooks(module: nn.Module) -> bool:
    """Whether all hooks of a module's forward pass are those by which transformers collects outputs, none of them
    hidden states. They stay at a module from the first call that collects something, and do nothing in other calls."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        code = getattr(hook, "__code__", None)
        if code is None or hook.__module__ != output_capturing.__name__:
            return False
        cells = dict(zip(code.co_freevars, hook.__closure__ or (), strict=True))
        if "key" not in cells or cells["key"].cell_contents == "hidden_states":
            return False
    return True


def has_hook_of_a_user(module: nn.Module) -> bool:
    """Whether a hook of a module's forward or backward pass is not one by which transformers collects outputs."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(
        getattr(hook, "__module__", None) != output_capturing.__name__
        for hook in chain.from_iterable(of_kind.values() for of_kind in hooks if of_kind)
    )


def is_empty(cache: Any, layer: int | None) -> bool:
    """Whether this is the usual cache, on the device of its layers, and a layer has written nothing to it."""
    if type(cache) is not DynamicCache or cache.offloading or layer is None:
        return False
    kind = type(cache.layers[layer]) if layer < len(cache.layers) else cache.layer_class_to_replicate
    return kind is DynamicLayer and not cache.get_seq_length(layer)
