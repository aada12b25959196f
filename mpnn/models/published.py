"""`load_weights`: weights that were published for transformers, in this library's own definitions.

A definition has one table of names: pairs (old, new), replaced in this order in every name. Weights of another shape or
order go through a function of (our name, weight) that returns our weights by name.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from mpnn.models.layers.images import kernel_as_linear
from mpnn.models.text.bert import Bert
from mpnn.models.text.gpt import CausalTransformer
from mpnn.models.text.llama import Llama
from mpnn.models.text.longformer import Longformer
from mpnn.models.text.mamba2 import Mamba2
from mpnn.models.text.reformer import Reformer
from mpnn.models.text.transformer import Transformer
from mpnn.models.text.xlnet import XLNet
from mpnn.models.vision.mae import MAE
from mpnn.models.vision.swin import Swin
from mpnn.models.vision.vit import ViT

M = TypeVar("M", bound=nn.Module)


def load_weights(model: M, state_dict: Mapping[str, Tensor]) -> M:
    """Copies the weights of a bare model of transformers into a model of this library, and returns it.

        bert = load_weights(Bert(BertConfig()), transformers.BertModel.from_pretrained(name).state_dict())

    Args:
        model: a `Bert` (BERT, RoBERTa, BigBird), `Longformer`, `GPT2` (also of OpenAI GPT), `Llama` (Llama, Mistral),
            `Mamba2`, `Transformer` (BART, Marian), `XLNet`, `Reformer`, `ViT`, `Swin` or `MAE`, of the same sizes.
        state_dict: the weights of `hf_model.base_model`; of `ViTMAEForPreTraining` for `MAE`; of `LlamaForCausalLM` for
            a `Llama` that is not tied, and likewise for a `Mamba2`.

    Raises:
        TypeError: if the model has no table of names.
        RuntimeError: if weights are missing, unknown or of another size; the message names them.
    """
    table = next((table for kind, table in TABLES.items() if isinstance(model, kind)), None)
    if table is None:
        names = ", ".join(kind.__name__ for kind in TABLES)
        raise TypeError(f"load_weights knows the weights of {names}; got {type(model).__name__}")
    pairs, change = table
    weights: dict[str, Tensor] = {}
    for name, weight in state_dict.items():
        for old, new in pairs:
            name = name.replace(old, new)
        weights |= {name: weight} if change is None else change(name, weight)
    own = model.state_dict()
    for name, weight in weights.items():  # tables of positions begin with rows that no token uses
        if name.endswith("position.weight") and isinstance(model, Transformer):
            weights[name] = weight[-len(own[name]) :]
    model.load_state_dict(weights)
    return model


Pairs = tuple[tuple[str, str], ...]
Change = Callable[[str, Tensor], dict[str, Tensor]]

_BERT: Pairs = (
    ("embeddings.word_embeddings.", "embeddings.token."),
    ("embeddings.position_embeddings.", "embeddings.position."),
    ("embeddings.token_type_embeddings.", "embeddings.token_type."),
    ("embeddings.LayerNorm.", "embeddings.norm."),
    ("encoder.layer.", "layers."),
    (".attention.self.", ".attention.to_"),
    (".attention.output.dense.", ".attention.to_out."),
    (".attention.output.LayerNorm.", ".update.norm."),
    (".intermediate.dense.", ".update.ffn.0."),
    (".output.dense.", ".update.ffn.3."),
    (".output.LayerNorm.", ".update.ffn_norm."),
    ("pooler.dense.", "pooler."),
    ("pooler.", "pooler.0."),
)
_LONGFORMER: Pairs = (
    *((f".attention.self.{which}_global.", f".wide.attention.to_{which}.") for which in ("query", "key", "value")),
    (".attention.self.", ".near.attention.to_"),
    (".attention.output.dense.", ".near.attention.to_out."),
    *_BERT,
)
_GPT: Pairs = (
    ("wte.", "token."),
    ("wpe.", "position."),
    ("ln_f.", "norm."),
    ("tokens_embed.", "token."),
    ("positions_embed.", "position."),
    ("h.", "layers."),
    (".attn.c_attn.", ".attention."),
    (".attn.c_proj.", ".attention.to_out."),
    (".ln_1.", ".update.norm."),
    (".ln_2.", ".update.ffn_norm."),
    (".mlp.c_fc.", ".update.ffn.0."),
    (".mlp.c_proj.", ".update.ffn.3."),
)
_LLAMA: Pairs = (
    ("lm_head.", "head."),
    ("model.", ""),
    ("embed_tokens.", "token."),
    *((f".self_attn.{which[0]}_proj.", f".attention.to_{which}.") for which in ("query", "key", "value", "out")),
    (".input_layernorm.", ".update.norm."),
    (".post_attention_layernorm.", ".update.ffn_norm."),
    (".mlp.gate_proj.", ".update.ffn.to_gate."),
    (".mlp.up_proj.", ".update.ffn.to_hidden."),
    (".mlp.down_proj.", ".update.ffn.to_out."),
)
_MAMBA2: Pairs = (
    ("lm_head.", "head."),
    ("backbone.", ""),
    ("embeddings.", "token."),
    ("norm_f.", "norm."),
    (".mixer.in_proj.", ".to_parts."),
    (".mixer.out_proj.", ".to_out."),
    (".mixer.conv1d.", ".convolution.attention."),
    (".mixer.norm.", ".gated."),
    (".mixer.A_log", ".recurrence.attention.log_decay"),
    (".mixer.dt_bias", ".recurrence.attention.step_bias"),
    (".mixer.D", ".recurrence.update.weight"),
)
_BART: Pairs = (
    *((f"{ours}coder.embed_", f"{name}.") for ours, name in (("en", "source"), ("de", "target"))),
    *((f"{ours}coder.layernorm_embedding.", f"{name}.norm.") for ours, name in (("en", "source"), ("de", "target"))),
    (".tokens.", ".token."),
    (".positions.", ".position."),
    (".layers.", "."),
    (".encoder_attn.", ".across.attention."),
    (".encoder_attn_layer_norm.", ".across.update.norm."),
    (".self_attn.", ".within.attention."),
    (".self_attn_layer_norm.", ".within.update.norm."),
    (".q_proj.", ".to_query."),
    (".k_proj.", ".to_key."),
    (".v_proj.", ".to_value."),
    (".out_proj.", ".to_out."),
    (".fc1.", ".across.update.ffn.0."),
    (".fc2.", ".across.update.ffn.3."),
    (".final_layer_norm.", ".across.update.ffn_norm."),
)
_XLNET: Pairs = (
    ("word_embedding.", "token."),
    ("mask_emb", "unknown"),
    ("layer.", "layers."),
    (".ff.layer_norm.", ".update.ffn_norm."),
    (".ff.layer_1.", ".update.ffn.0."),
    (".ff.layer_2.", ".update.ffn.3."),
    (".rel_attn.layer_norm.", ".update.norm."),
    (".rel_attn.r_w_bias", ".attention.by_content"),
    (".rel_attn.r_r_bias", ".attention.by_position"),
    (".rel_attn.r_s_bias", ".attention.by_segment"),
    (".rel_attn.seg_embed", ".attention.segment"),
    *((f".rel_attn.{which[0]}", f".attention.to_{which}.weight") for which in ("query", "key", "value", "out")),
    (".rel_attn.r", ".attention.to_position.weight"),
)
_REFORMER: Pairs = (
    ("embeddings.word_embeddings.", "token."),
    ("embeddings.position_embeddings.embedding.", "position."),
    ("embeddings.position_embeddings.weights.0", "position.row.weight"),
    ("embeddings.position_embeddings.weights.1", "position.column.weight"),
    ("encoder.layer_norm.", "norm."),
    ("encoder.layers.", "layers."),
    (".attention.layer_norm.", ".update.norm."),
    (".attention.self_attention.query_key.", ".attention.to_query."),
    (".attention.self_attention.", ".attention.to_"),
    (".attention.output.dense.", ".attention.to_out."),
    (".feed_forward.layer_norm.", ".update.ffn_norm."),
    (".feed_forward.dense.dense.", ".update.ffn.0."),
    (".feed_forward.output.dense.", ".update.ffn.3."),
)
_VIT_LAYER: Pairs = (
    *((f".attention.{which[0]}_proj.", f".attention.to_{which}.") for which in ("query", "key", "value", "out")),
    (".layernorm_before.", ".update.norm."),
    (".layernorm_after.", ".update.ffn_norm."),
    (".mlp.fc1.", ".update.ffn.0."),
    (".mlp.fc2.", ".update.ffn.3."),
)
_VIT: Pairs = (
    ("embeddings.cls_token", "class_token"),
    ("embeddings.position_embeddings", "positions.weight"),
    ("embeddings.patch_embeddings.projection.", "patches.to_dim."),
    ("pooler.dense.", "pooler.0."),
    *_VIT_LAYER,
    ("layernorm.", "norm."),
)
_MAE: Pairs = (
    ("vit.", "encoder."),
    ("decoder.decoder_embed.", "decoder.to_dim."),
    ("decoder.decoder_pos_embed", "decoder.positions.weight"),
    ("decoder.decoder_norm.", "decoder.norm."),
    ("decoder.decoder_pred.", "decoder.to_pixels."),
    ("decoder.decoder_layers.", "decoder.layers."),
    *_VIT,
)
_SWIN: Pairs = (
    ("embeddings.norm.", "patch_norm."),
    ("encoder.layers.", "stages."),
    (".blocks.", ".layers."),
    (".attention.relative_position_bias.relative_position_bias_table", ".attention.positions.0.table"),
    (".downsample.reduction.weight", ".merge.round.attention.weight"),
    (".downsample.norm.", ".merge.round.attention.norm."),
    *_VIT,
    (".attention.to_", ".round.attention.to_"),
    (".attention.positions.", ".round.attention.positions."),
    (".update.", ".round.update."),
)


def _share_output(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Both rounds of a Longformer's layer have one output map."""
    return {name: weight} | ({name.replace(".near.", ".wide."): weight} if ".to_out." in name else {})


def _split(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Linear maps of GPT are transposed, and those of query, key and value are one."""
    if not name.startswith("layers.") or "norm." in name:
        return {name: weight}
    weight = weight.mT if weight.dim() == 2 else weight
    head, _, kind = name.rpartition(".")
    if not head.endswith(".attention"):
        return {name: weight}
    parts = zip(("query", "key", "value"), weight.chunk(3), strict=True)
    return {f"{head}.to_{part}.{kind}": chunk for part, chunk in parts}


def _one_encoder(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Layers of an encoder have one attention; the shared embedding stands under its other names too."""
    if name == "shared.weight":
        return {}
    return {name.replace(".within.", ".").replace(".across.", ".") if name.startswith("encoder.") else name: weight}


def _by_node(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Weights of short convolutions are [channels, 1, kernel]."""
    return {name: weight.squeeze(1).T if weight.dim() == 3 else weight}


def _as_maps(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Maps of XLNet are [dim, H, D]; the output map is from [H, D] to dim."""
    if name == "unknown":
        return {name: weight.flatten()}
    if weight.dim() == 3 and name.endswith(".weight"):
        return {name: weight.flatten(1) if name.endswith("to_out.weight") else weight.flatten(1).T}
    return {name: weight}


def _as_table(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Axial positions of a Reformer are [rows, 1, dim] and [1, columns, dim]."""
    return {name: weight.flatten(0, 1) if name.startswith(("position.row", "position.column")) else weight}


def _images(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Patches are cut by a convolution there; tokens and positions are [1, N, dim]. The offsets of a Swin are those of
    destinations there, of sources here, and its four merged patches lie column by column there, row by row here."""
    last = name.rpartition(".")[2]
    if name.endswith("patches.to_dim.weight"):
        weight = kernel_as_linear(weight)
    elif last in ("class_token", "mask_token"):
        weight = weight.flatten()
    elif name.endswith("positions.weight"):
        weight = weight[0]
    elif last == "table":
        weight = weight.flip(0)
    elif ".merge." in name:
        cells = weight.unflatten(-1, (4, -1))[..., (0, 2, 1, 3), :]
        weight = cells.movedim(0, -1) if last == "weight" and ".norm." not in name else cells.flatten()
    return {name: weight}


TABLES: dict[type[nn.Module], tuple[Pairs, Change | None]] = {
    Longformer: (_LONGFORMER, _share_output),
    Bert: (_BERT, None),
    CausalTransformer: (_GPT, _split),
    Llama: (_LLAMA, None),
    Mamba2: (_MAMBA2, _by_node),
    Transformer: (_BART, _one_encoder),
    XLNet: (_XLNET, _as_maps),
    Reformer: (_REFORMER, _as_table),
    MAE: (_MAE, _images),
    ViT: (_VIT, _images),
    Swin: (_SWIN, _images),
}
"""By definition: its names, and what changes weights."""
