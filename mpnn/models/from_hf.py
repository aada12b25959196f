"""Models of Hugging Face's transformers, run as message passing: the same weights, the same call, any topology.

A family is one function that makes a module of this library out of one of theirs, and one row in `_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.models.bert import Bert, BertConfig
from mpnn.models.blocks import ACTIVATIONS
from mpnn.topology import Topology


def from_hf(hf_model: Any, graph: Topology | None = None) -> nn.Module:
    """A Hugging Face model as message passing: `from_hf(model, graph=window(16))` swaps who hears whom.

    The result has a copy of the weights, on the same device, in the same precision and in the same mode (training or
    evaluation), is called as the original is, and answers with the same output object.

    Args:
        hf_model: a `transformers.BertModel`.
        graph: a topology; None keeps the model's own (BERT: `complete()`).

    Raises:
        ImportError: transformers is not installed.
        TypeError: not a model of transformers, or a graph that is no topology.
        ValueError: a family, a model class or a configuration that is not supported; the sentence names it.
    """
    transformers = _transformers()
    if not isinstance(hf_model, transformers.PreTrainedModel):
        raise TypeError(f"from_hf takes a model of transformers, such as BertModel; got {type(hf_model).__name__}")
    if graph is not None and not isinstance(graph, Topology):
        raise TypeError(
            f"graph must be a Topology, such as window(16), because sentences differ in length; got {graph!r}"
        )
    family = hf_model.config.model_type
    if family not in _FAMILIES:
        raise ValueError(f"from_hf has no config.model_type {family!r}; it has {', '.join(_FAMILIES)}")
    return _FAMILIES[family](hf_model, graph).train(hf_model.training)


class Encoder(nn.Module):
    """An encoder that is called as those of transformers are."""

    def __init__(self, model: Bert, config: Any) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """One pass over B sentences of at most N tokens.

        Args:
            input_ids: int64 [B, N]; or inputs_embeds: [B, N, dim], vectors in place of token embeddings.
            attention_mask: [B, N], 1 where there is a token and 0 where there is none, in any arrangement.
            token_type_ids: int64 [B, N], default 0. position_ids: int64 [B, N] or [1, N], default 0 to N-1.
            output_hidden_states, output_attentions, return_dict: as in transformers; default: the configuration's.

        Returns:
            `BaseModelOutputWithPoolingAndCrossAttentions`, or its tuple: last_hidden_state [B, N, dim], pooler_output
            [B, dim], hidden_states, attentions [B, H, N, N]. All are zeros where there is no token, and sentences are
            pooled at their first token, also where padding comes before it.

        Raises:
            ValueError, TypeError, IndexError: an argument that does not fit; the sentence names it.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        tokens = _one_of(input_ids, inputs_embeds, self.config.hidden_size)
        shape = (tokens.shape[0], tokens.shape[1])
        found = self.model(
            tokens,
            None if attention_mask is None else _kept(attention_mask, shape),
            None if token_type_ids is None else _per_token("token_type_ids", token_type_ids, shape),
            None if position_ids is None else _per_token("position_ids", position_ids, shape),
            return_states=self._wanted("output_hidden_states", output_hidden_states),
            return_weights=self._wanted("output_attentions", output_attentions),
        )
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=found.last,
            pooler_output=found.pooled,
            hidden_states=found.states,
            attentions=found.weights,
        )
        return output if self._wanted("return_dict", return_dict) else output.to_tuple()

    def _wanted(self, name: str, given: bool | None) -> bool:
        wanted = getattr(self.config, name) if given is None else given
        if not isinstance(wanted, bool):
            raise TypeError(f"{name} must be True or False; got {wanted!r}")
        return wanted


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError('from_hf needs transformers, which is not installed; run: pip install "mpnn[hf]"') from error
    return transformers


# ---------------------------------------------------------------------------------------------------- what is given


def _one_of(input_ids: Tensor | None, inputs_embeds: Tensor | None, dim: int) -> Tensor:
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"give either input_ids or inputs_embeds; got {'neither' if input_ids is None else 'both'}")
    if input_ids is not None:
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ValueError(f"input_ids must be integers [batch, length]; got {_described(input_ids)}")
        return input_ids
    assert inputs_embeds is not None
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != dim or not inputs_embeds.is_floating_point():
        raise ValueError(
            f"inputs_embeds must be floating point [batch, length, {dim}]; got {_described(inputs_embeds)}"
        )
    return inputs_embeds


def _kept(mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """The attention mask as bool [B, N]."""
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask must have shape [batch, length] = {list(shape)}, 1 where there is a token; got "
            f"{list(mask.shape)}. Who hears whom within a sentence is the topology's to say: from_hf(model, graph=...)"
        )
    keep = mask == 1
    if not bool((keep | (mask == 0)).all()):
        bad = mask[~keep & (mask != 0)][0].item()
        raise ValueError(f"attention_mask must hold 0 and 1 only; got {bad}")
    return keep


def _per_token(name: str, ids: Tensor, shape: tuple[int, int]) -> Tensor:
    if ids.dim() != 2 or ids.shape[0] not in (1, shape[0]) or ids.shape[1] != shape[1] or ids.is_floating_point():
        raise ValueError(f"{name} must be integers [batch, length] = {list(shape)}; got {_described(ids)}")
    return ids.expand(shape)


def _described(x: Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}"


# ---------------------------------------------------------------------------------------------------- families


def _bert(hf_model: Any, graph: Topology | None) -> Encoder:
    config = hf_model.config
    _check_class(hf_model, "BertModel")
    _check_config(
        config,
        is_decoder=False,
        add_cross_attention=False,
        position_embedding_type="absolute",
        is_causal=False,
        quantization_config=None,
    )
    ours = BertConfig(
        vocabulary=config.vocab_size,
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        hidden=config.intermediate_size,
        context=config.max_position_embeddings,
        types=config.type_vocab_size,
        pad=config.pad_token_id,
        activation=_activation(config, "hidden_act"),
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
    )
    model = _with_weights(lambda: Bert(ours, graph, pooler=hf_model.pooler is not None), hf_model, _BERT_NAMES)
    return Encoder(model, config)


_BERT_NAMES = (
    ("embeddings.word_embeddings.", "embeddings.token."),
    ("embeddings.position_embeddings.", "embeddings.position."),
    ("embeddings.token_type_embeddings.", "embeddings.token_type."),
    ("embeddings.LayerNorm.", "embeddings.norm."),
    ("encoder.layer.", "layers."),
    (".attention.self.query.", ".attention.to_query."),
    (".attention.self.key.", ".attention.to_key."),
    (".attention.self.value.", ".attention.to_value."),
    (".attention.output.dense.", ".attention.to_out."),
    (".attention.output.LayerNorm.", ".update.norm."),
    (".intermediate.dense.", ".update.ffn.0."),
    (".output.dense.", ".update.ffn.3."),
    (".output.LayerNorm.", ".update.ffn_norm."),
    ("pooler.dense.", "pooler.0."),
)

_FAMILIES: dict[str, Callable[[Any, Topology | None], nn.Module]] = {"bert": _bert}


def _check_class(hf_model: Any, *supported: str) -> None:
    name = type(hf_model).__name__
    if name not in supported:
        raise ValueError(
            f"from_hf takes {' or '.join(supported)} of the family {hf_model.config.model_type!r}; got {name}"
        )


def _check_config(config: Any, **supported: Any) -> None:
    """Refuses a configuration whose field has another value than the one supported; an absent field is fine."""
    for name, value in supported.items():
        given = getattr(config, name, value)
        if given != value:
            raise ValueError(f"from_hf does not support config.{name} = {given!r}, only {value!r}")


def _activation(config: Any, field: str) -> str:
    name = getattr(config, field)
    if name not in ACTIVATIONS:
        raise ValueError(f"from_hf does not support config.{field} = {name!r}, only {', '.join(ACTIVATIONS)}")
    return name


def _with_weights(build: Callable[[], Bert], hf_model: Any, names: Iterable[tuple[str, str]]) -> Bert:
    """What `build` makes, with copies of the weights of `hf_model`, each under the name that replacements give it.

    Built on the meta device, so that no weights are drawn only to be thrown away.
    """
    weights = {}
    for name, weight in hf_model.named_parameters():
        for theirs, ours in names:
            name = name.replace(theirs, ours)
        weights[name] = weight
    with torch.device("meta"):
        model = build()
    model.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()}, assign=True)
    for name, weight in model.named_parameters():
        weight.requires_grad_(weights[name].requires_grad)
    return model
