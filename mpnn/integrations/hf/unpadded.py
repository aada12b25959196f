"""Encoders without padding: the tokens of a padded batch become one row of documents, so no layer computes padding.

Attention separates the documents (`packing.py`), positions are those of the padded batch, and all other layers of an
encoder treat each token by itself. The forward pass of the bare model is replaced, so its heads and
sentence-transformers see the shapes that they expect.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpnn.graph.runs import Ints
from mpnn.integrations.hf import masks, packing
from mpnn.integrations.hf.compat import has_hook_of_a_user
from mpnn.integrations.hf.packing import default_positions

_MIXING = nn.Conv1d, nn.Conv2d, nn.RNNBase  # layers in which tokens of two documents would meet

PROVEN = frozenset({
    "albert", "bert", "bert-generation", "camembert", "data2vec-text", "distilbert", "electra", "embedding_gemma2",
    "embedding_gemma2_text", "ernie", "esm", "esmc", "eurobert", "gte", "jina_embeddings_v3", "layoutlm", "markuplm",
    "modernbert", "mpnet", "neomme", "nomic_bert", "openai_privacy_filter", "roberta", "roberta-prelayernorm",
    "roc_bert", "splinter", "ultrabert", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""The families whose texts a test changed, and found that no other text of the batch changed
(`tests/integrations/test_hf_unpadded.py` walks all encoders of transformers)."""

_MIXED = {
    "big_bird": "its pooler reads the first state of the batch, and its blocks begin at slots of the row",
    "clip_text_model": "it pools the state of the token with the largest number in the row",
    "longformer": "it pads rows to whole windows",
    "mobilebert": "its embeddings contain those of the tokens before and after",
    "tipsv2_text_model": "it pools the states of the whole row",
}
"""Families with the form of an encoder that keep their padding, and why."""


def remove_padding(model: Any) -> Callable[[], None]:
    """Makes a bare encoder (`BertModel`) compute the tokens of a padded batch only; returns what undoes it.

    States at padding are zeros. A call without padding or with padding between tokens, with `output_attentions=True`,
    with `inputs_embeds`, with a cache or with hooks on modules inside the model, which would not find the tokens of
    each text at their places, runs as before."""
    if not is_encoder(model):
        raise ValueError(f"padding cannot be removed from {type(model).__name__}: {_reason(model)}")
    if isinstance(packing.replaced(model), _WithoutPadding):
        return lambda: None
    return packing.replace(model, _WithoutPadding(model))


def is_encoder(model: Any) -> bool:
    """Whether the tokens of a padded batch can be moved: a test found that texts of this family stay apart."""
    config = model.config
    return config.model_type in PROVEN and not getattr(config, "token_dropout", False) and could_unpad(model)


def _reason(model: Any) -> str:
    """Why a model keeps its padding."""
    family = model.config.model_type
    if not could_unpad(model):
        return (
            "it is not an encoder whose forward pass takes input_ids, attention_mask and position_ids and was not "
            "replaced (by hooks of accelerate), and whose other layers treat each token by itself"
        )
    if family in PROVEN:
        return "its embeddings depend on how many tokens of a row are masked (token_dropout)"
    return _MIXED.get(family, f"no test has found that texts of the family {family} stay apart without it")


def takes_positions(kind: Any) -> bool:
    """Whether the forward pass of a class of models takes tokens, a mask and positions."""
    return {"input_ids", "attention_mask", "position_ids"} <= set(_signature_of(kind.forward).parameters)


def could_unpad(model: Any) -> bool:
    """Whether a model has the form of an encoder without padding: attention is bidirectional, positions are an
    argument, and no layer mixes tokens by its class. Its code may mix them elsewhere, which only a test finds."""
    config = model.config
    is_own = isinstance(packing.replaced(model), (_WithoutPadding, NoneType))  # else accelerate's hooks
    is_encoder = not config.is_encoder_decoder and not getattr(config, "is_decoder", False)
    mixes = (getattr(module, "is_causal", False) or isinstance(module, _MIXING) for module in model.modules())
    return is_own and is_encoder and takes_positions(type(model)) and not any(mixes)


class _WithoutPadding:
    """The forward pass of a model. It is an object, not a closure, so that copies of the model call themselves."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def __signature__(self) -> inspect.Signature:
        """Returns the signature by which the trainer of transformers chooses the columns of a dataset."""
        return packing.signature_of(self.model)

    def __call__(self, *args: Any, **options: Any) -> Any:
        model = self.model
        forward: Any = type(model).forward
        given = _arguments(_signature_of(type(model).forward), (model, *args), options)
        texts = _texts(model, given)
        if texts is None or any(map(has_hook_of_a_user, list(model.modules())[1:])):
            return forward(model, *args, **options)
        del given["attention_mask"]
        return_dict = given.pop("return_dict", None)
        if given.get("position_ids") is None:
            given["position_ids"] = default_positions(model, given["input_ids"])
        packed = {name: texts.pack(value) for name, value in given.items()}
        with packing.within(texts.packing):
            out = forward(model, **packed, attention_mask=None, return_dict=True)
        out.last_hidden_state = texts.pad(out.last_hidden_state)
        if out.get("hidden_states") is not None:
            out.hidden_states = tuple(map(texts.pad, out.hidden_states))
        if out.get("pooler_output") is not None:
            out.pooler_output = _pooled(model, out.last_hidden_state)
        wants_dict = model.config.return_dict if return_dict is None else return_dict
        return out if wants_dict else out.to_tuple()


class Texts(NamedTuple):
    """The tokens of a padded batch [B, N].

    lengths: of the texts with tokens, int64 on the CPU. places: of the tokens among all, int64 [T]. starts: the
    cumulative lengths, int32. The last two are on the device of the batch.
    """

    shape: tuple[int, int]
    lengths: Ints
    places: Tensor
    starts: Tensor

    @classmethod
    def of(cls, keep: Tensor) -> "Texts | None":
        """None if there is no padding, no token, or padding between tokens, where it would count in the distances of
        windows. `keep` is bool [B, N]. This waits for the device once, as numbers decide how many tokens there are."""
        allowed = keep.cpu().numpy()
        lengths = allowed.sum(1)
        changes = np.count_nonzero(allowed[:, 1:] != allowed[:, :-1], axis=1) + allowed[:, 0] + allowed[:, -1]
        if not lengths.any() or lengths.sum() == allowed.size or (changes > 2).any():
            return None
        lengths = lengths[lengths > 0]
        places = torch.from_numpy(np.flatnonzero(allowed))
        starts = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
        return cls((keep.shape[0], keep.shape[1]), lengths, places.to(keep.device), starts.to(keep.device))

    @property
    def packing(self) -> packing.Packing:
        """The texts as layers find them."""
        lengths: list[int] = self.lengths.tolist()
        return packing.Packing((1, sum(lengths)), lengths, self.starts)

    def pack(self, value: Any) -> Any:
        """Tensors [B, N, ...] as [1, T, ...]; everything else as it is."""
        if isinstance(value, Tensor) and value.shape[:2] == self.shape:
            return value.flatten(0, 1).index_select(0, self.places)[None]
        return value

    def pad(self, states: Tensor) -> Tensor:
        """States of tokens [1, T, D] -> [B, N, D], zeros at padding."""
        zeros = states.new_zeros(self.shape[0] * self.shape[1], states.shape[-1])
        return zeros.index_copy(0, self.places, states[0]).view(*self.shape, -1)


def _pooled(model: Any, states: Tensor) -> Tensor:
    """Returns the pooled output of the first state of each text of states [B, N, D]."""
    if isinstance(model.pooler, nn.Linear):  # ALBERT
        return model.pooler_activation(model.pooler(states[:, 0]))
    return model.pooler(states)


_signature_of = lru_cache(maxsize=64)(inspect.signature)


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, by name."""
    bound = signature.bind(*args, **options).arguments
    del bound["self"]
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    return bound | bound.pop(rest, {})


def _texts(model: Any, given: dict[str, Any]) -> Texts | None:
    """The texts of a padded batch; None if the call runs as before."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    attentions = given.get("output_attentions")
    wants_attentions = model.config.output_attentions if attentions is None else attentions
    others = [given.get(name) for name in ("inputs_embeds", "past_key_values", "encoder_hidden_states")]
    is_padded = ids is not None and mask is not None and mask.shape == ids.shape and ids.dim() == 2
    if not is_padded or wants_attentions or any(other is not None for other in others) or masks.is_capturing():
        return None
    return Texts.of(given["attention_mask"].bool())
