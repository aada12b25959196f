"""Attention layers of transformers that do not dispatch through its `AttentionInterface`, as message passing.

Each class inherits from a layer of transformers and overrides the method that computes attention. `adapt` gives the
layers of a model these classes, so the model keeps its weights, heads, caches and `save_pretrained`.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.models.big_bird import modeling_big_bird as big_bird
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.deberta import modeling_deberta as deberta
from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta_v2
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.longformer import modeling_longformer as longformer
from transformers.models.mpnet import modeling_mpnet as mpnet
from transformers.models.mpt import modeling_mpt as mpt
from transformers.models.openai import modeling_openai as openai
from transformers.models.reformer import modeling_reformer as reformer
from transformers.models.xlnet import modeling_xlnet as xlnet

from mpnn import Graph, Topology, ops
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.data import selected
from mpnn.graphs import chunks, from_blocks, window
from mpnn.graphs.content import drop_self_loops
from mpnn.integrations.hf import compat
from mpnn.integrations.hf.builders import placed, sources
from mpnn.integrations.hf.closures import Rule, Sizes, parse
from mpnn.integrations.hf.interface import attend, must_be_causal, text_of
from mpnn.integrations.hf.masks import Instead, Mask, from_dense
from mpnn.integrations.hf.offset_bias import OffsetBias, passes_on
from mpnn.integrations.hf.packing import once
from mpnn.update.rows import is_hooked

_CAUSAL = (None, 0)
_COMPLETE = (None, None)
_MASKS = WeakTensorKeyDictionary()
_PLAIN = nn.Module()  # a layer without a topology of its own, for masks that already contain it


def _cached(tensor: Tensor, build: Callable[[], Any], key: Any = None) -> Any:
    """The result of `build`, for a tensor that a model creates in each forward pass and all layers share."""
    return once(_MASKS.setdefault(tensor, {}), key, build)


def topology_of(layer: nn.Module) -> Topology | None:
    """The topology that `config.mpnn_graph` gives a layer, or None for its own graph."""
    text = text_of(layer)
    return None if text is None else parse(text)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, H * D] -> [B, H, N, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _with_past(layer: Any, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, N, D] with those of earlier tokens, if there is a cache."""
    return (key, value) if cache is None else cache.update(key, value, layer.layer_idx)


def _refuse_weights(layer: nn.Module, requested: Any) -> None:
    if requested:
        raise ValueError(f"{type(layer).__name__} gives no output_attentions; call the model without them")


def _dropout(layer: nn.Module, module: nn.Module) -> float:
    """The probability with which the dropout module of a layer drops an attention weight: 0 in inference.

    Raises:
        ValueError: if the module computes something else. It would get all weights as a matrix, which is never made.
    """
    if type(module) is not nn.Dropout or is_hooked(module):
        raise ValueError(
            f"the dropout of {type(layer).__name__} has hooks or code of its own, which would get all attention "
            "weights as a matrix; mpnn makes none. Remove them, or use attn_implementation='eager'"
        )
    return float(module.p) if layer.training else 0.0


def _over_topology(allowed: Tensor, topology: Topology | None, first_query: int = 0) -> Mask:
    """The mask of the pairs allowed bool [B, 1, queries, keys]. A topology leaves out further pairs, and its positions
    count from the first column."""
    mask = from_dense(allowed, first_query)
    if topology is None:
        return mask
    return Mask.of_rules([Rule(placed(topology) & rule.topology) for rule in mask.rules], mask.sizes)


def _with_key_bias(query: Tensor, key: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key with one more feature, whose product is the bias of a key: [B, H, N, D + 1].

    bias: [B or 1, H, 1, keys], as ALiBi's (Press et al. 2022), which is the same for all queries. A grouped key gets as
    many heads as the query.
    """
    batch, heads, queries, _ = query.shape
    key = key.expand(-1, heads, -1, -1) if key.shape[1] == 1 else key
    column = bias.to(key).expand(batch, heads, 1, -1).mT
    return torch.cat([query, query.new_ones(batch, heads, queries, 1)], -1), torch.cat([key, column], -1)


class GPTAttention(openai.Attention):
    """OpenAI GPT (Radford et al. 2018): causal."""

    is_causal = True

    def _attn(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, output_attentions: bool = False
    ) -> Any:
        sizes = Sizes(q.shape[2], q.shape[2])
        if attention_mask is None:
            mask = Mask(1, sizes, _CAUSAL)
        else:
            keep = attention_mask[:, 0, 0] == 0
            mask = _cached(attention_mask, lambda: Mask(len(keep), sizes, _CAUSAL, keep))
        out, weights = attend(
            self,
            q,
            k.mT,
            v,
            mask,
            scaling=v.shape[-1] ** -0.5 if self.scale else 1.0,
            dropout=_dropout(self, self.attn_dropout),
            output_attentions=output_attentions,
        )
        return [out.transpose(1, 2), weights] if output_attentions else [out.transpose(1, 2)]


class XLNetAttention(xlnet.XLNetRelativeAttention):
    """XLNet (Yang et al. 2019): what the masks of its two streams allow. Positions and segments are biases."""

    def rel_attn_core(
        self,
        q_head: Tensor,
        k_head_h: Tensor,
        v_head_h: Tensor,
        k_head_r: Tensor,
        seg_mat: Tensor | None = None,
        attn_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Any:
        queries, keys = len(q_head), len(k_head_h)
        bias = torch.einsum("ibnd,jbnd->bnij", q_head + self.r_r_bias, k_head_r)
        bias = self.rel_shift_bnij(bias, klen=keys)
        if seg_mat is not None:
            by_segment = torch.einsum("ibnd,snd->ibns", q_head + self.r_s_bias, self.seg_embed)
            bias = bias + torch.einsum("ijbs,ibns->bnij", seg_mat, by_segment)
        topology = topology_of(self)

        def build() -> Mask:
            allowed = torch.ones(1, 1, queries, keys) if attn_mask is None else attn_mask.permute(2, 3, 0, 1) <= 0
            return _over_topology(allowed, topology, keys - queries)

        query, key, value = (x.permute(1, 2, 0, 3) for x in (q_head + self.r_w_bias, k_head_h, v_head_h))
        out, weights = attend(
            _PLAIN,
            query,
            key,
            value,
            build() if attn_mask is None else _cached(attn_mask, build, topology),
            scaling=self.scale,
            position_bias=self.scale * bias,
            dropout=_dropout(self, self.dropout),
            output_attentions=output_attentions,
        )
        out = out.transpose(0, 1)
        return out if weights is None else (out, weights.permute(2, 3, 0, 1))


class LongformerAttention(longformer.LongformerSelfAttention):
    """Longformer (Beltagy et al. 2020, section 3): windows, or a topology instead, and global tokens."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        is_index_masked: Any = None,
        is_index_global_attn: Any = None,
        is_global_attn: Any = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor]:
        _refuse_weights(self, output_attentions)
        batch, length, _ = hidden_states.shape
        hubs = is_index_global_attn
        keep = ~is_index_masked
        topology = topology_of(self)
        radius = self.one_sided_attn_window_size
        dropout = self.dropout if self.training else 0.0

        def build() -> Mask:
            near = window(radius) if topology is None else placed(topology)
            rules = [
                Rule((near | sources(hub.numpy().tobytes())) & sources(kept.numpy().tobytes()))
                for hub, kept in zip(hubs.cpu(), keep.cpu(), strict=True)
            ]
            return Mask.of_rules(rules, Sizes(length, length))

        query, key, value = (_heads(to(hidden_states), self.num_heads) for to in (self.query, self.key, self.value))
        mask = _cached(attention_mask, build, (topology, radius))
        out, _ = attend(_PLAIN, query, key, value, mask, dropout=dropout)
        out = out.flatten(2).masked_fill(is_index_masked[..., None], 0)
        if not is_global_attn:
            return (out,)
        first = hubs.byte().argsort(dim=1, descending=True, stable=True)[:, : int(hubs.sum(1).max())]  # [B, G]
        b = torch.arange(batch, device=first.device)[:, None]
        query = _heads(self.query_global(hidden_states[b, first]), self.num_heads)
        key, value = (_heads(to(hidden_states), self.num_heads) for to in (self.key_global, self.value_global))
        wide = _cached(
            attention_mask, lambda: Mask(batch, Sizes(first.shape[1], length), _COMPLETE, keep), first.shape[1]
        )
        rows, _ = attend(_PLAIN, query, key, value, wide, dropout=dropout)
        real = hubs[b, first]
        return (out.index_put((b.expand_as(first)[real], first[real]), rows.flatten(2)[real]),)


class BigBirdAttention(big_bird.BigBirdAttention):
    """Chooses blocks or complete attention; transformers changes to complete attention after a short batch."""

    def set_attention_type(self, value: str, layer_idx: int | None = None) -> None:
        super().set_attention_type(value, layer_idx)
        adapt(self, self.config)


class BigBirdFull(big_bird.BigBirdSelfAttention):
    """Complete or causal attention, with `attention_type="original_full"`. Keys of cross-attention are not cached."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cross = encoder_hidden_states is not None
        source = encoder_hidden_states if cross else hidden_states
        query, key, value = (
            _heads(to(x), self.num_attention_heads)
            for to, x in ((self.query, hidden_states), (self.key, source), (self.value, source))
        )
        key, value = _with_past(self, None if cross else past_key_values, key, value)
        out, weights = attend(
            self,
            query,
            key,
            value,
            encoder_attention_mask if cross else attention_mask,
            dropout=_dropout(self, self.dropout),
            is_causal=self.is_decoder and not cross,
            output_attentions=options.get("output_attentions"),
        )
        return out.flatten(2), weights


class BigBirdBlocks(big_bird.BigBirdBlockSparseAttention):
    """BigBird (Zaheer et al. 2020, section 2) as transformers has it: the first and the last block are global, and the
    other blocks attend to their neighbors. In training, each head draws random blocks. In evaluation the first block
    takes their place, so its tokens count `1 + num_random_blocks` times."""

    def forward(
        self,
        hidden_states: Tensor,
        band_mask: Any = None,
        from_mask: Any = None,
        to_mask: Any = None,
        *masks: Any,
        **o: Any,
    ) -> tuple[Tensor, None]:
        _refuse_weights(self, o.get("output_attentions"))
        batch, length, _ = hidden_states.shape
        keep = to_mask[:, 0, 0] > 0
        query, key, value = (
            _heads(to(hidden_states), self.num_attention_heads) for to in (self.query, self.key, self.value)
        )
        if topology_of(self) is not None:
            out, _ = attend(self, query, key, value, Mask(batch, Sizes(length, length), _COMPLETE, keep))
            return out.flatten(2) * from_mask[:, 0], None
        # Logits get <1, penalty_j> for padding and, in inner rows, <1, log(1 + random)> for the first block.
        size = self.block_size
        scale = self.attention_head_size**-0.5
        more_query = query.new_ones(batch, 1, length, 2)
        more_key = query.new_zeros(batch, 1, length, 2)
        more_key[..., 0] = (to_mask[:, 0] - 1) * 1e4 / scale
        if not self.training:
            more_query[:, :, :size, 1] = more_query[:, :, -size:, 1] = 0
            more_key[:, :, :size, 1] = log(1 + self.num_random_blocks) / scale
        query, key = (
            torch.cat([x, more.expand(-1, x.shape[1], -1, -1)], -1)
            for x, more in ((query, more_query), (key, more_key))
        )
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        tables = self._drawn(length) if self.training else [np.zeros((length // size - 2, 0), np.int64)]
        graphs = [_block_graph(table.tobytes(), size, length // size).to(query.device) for table in tables]
        parts = zip(*(x.chunk(len(graphs), 2) for x in (query, key, value)), strict=True)
        out = torch.cat([ops.attend(g, *part, scale=scale) for g, part in zip(graphs, parts, strict=True)], 2)
        return out.flatten(2) * from_mask[:, 0], None

    def _drawn(self, length: int) -> list[np.ndarray]:
        """The random blocks of each head, int64 [blocks - 2, random], drawn by transformers."""
        size = self.block_size
        heads = self.num_attention_heads
        random = self.num_random_blocks
        np.random.seed(self.seed)
        if length in (1024, 3072, 4096):
            drawn = self.max_seqlen, self.max_seqlen, size, size, random
            tables = [self._bigbird_block_rand_mask(*drawn, last_idx=1024)[: length // size - 2] for _ in range(heads)]
        else:
            plan = self._get_rand_attn_plan(length, size, random)
            tables = self._bigbird_block_rand_mask_with_head(length, length, size, size, heads, *plan)
        return [np.asarray(table, np.int64) for table in tables]


@torch.compiler.disable  # numpy computes the blocks
@cached_graph
def _block_graph(table: bytes, size: int, blocks: int) -> Graph:
    """The graph of one head, from its random source blocks, int64 [blocks - 2, random]."""
    random = np.frombuffer(table, np.int64).reshape(blocks - 2, -1)
    inner = [[*{0, i - 1, i, i + 1, blocks - 1}, *random[i - 1]] for i in range(1, blocks - 1)]
    sources = [range(blocks), *inner, range(blocks)]
    pairs = np.array([(src, dst) for dst, row in enumerate(sources) for src in row], np.int64).T
    with torch.inference_mode(False):
        return from_blocks(pairs, size, blocks)


class ReformerLocal(reformer.LocalSelfAttention):
    """Reformer (Kitaev et al. 2020), its local layers: chunks of positions."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, past_buckets_states: Any = None, *given: Any, **o: Any
    ) -> Any:
        _refuse_weights(self, o.get("output_attentions"))
        if _has_states(self, past_buckets_states):
            return super().forward(hidden_states, attention_mask, past_buckets_states, *given, **o)
        query, key, value = (
            to(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).flatten(0, 1)
            for to in (self.query, self.key, self.value)
        )
        batch, length, _ = hidden_states.shape
        graph = _topology_graph(self, attention_mask, batch, length, query.device)
        if graph is None:
            nodes = torch.arange(batch * length, device=query.device).view(batch, length)
            graph = _chunk_graph(self, nodes, attention_mask, length)
        out = ops.attend(graph, query, key, value, dropout=self.dropout if self.training else 0.0)
        return reformer.LocalSelfAttentionOutput(out.reshape(batch, length, -1), ())


class ReformerLSH(reformer.LSHSelfAttention):
    """Reformer, its other layers: chunks of nodes sorted by hashes, for each head. Keys are normalized queries, and a
    node attends to itself only if it has no other in-neighbor."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        num_hashes: int | None = None,
        buckets: Tensor | None = None,
        past_buckets_states: Any = None,
        *given: Any,
        **o: Any,
    ) -> Any:
        _refuse_weights(self, o.get("output_attentions"))
        if _has_states(self, past_buckets_states):
            return super().forward(hidden_states, attention_mask, num_hashes, buckets, past_buckets_states, *given, **o)
        batch, length, _ = hidden_states.shape
        heads = self.num_attention_heads
        rounds = num_hashes or self.num_hashes
        query, value = (_heads(to(hidden_states), heads) for to in (self.query_key, self.value))
        key = self._len_and_dim_norm(query, self.attention_head_size**0.5)  # divided by sqrt(D) already
        graph = _topology_graph(self, attention_mask, batch, length, query.device)
        own_graph_per_head = graph is None
        if graph is None:
            nodes = torch.arange(batch * heads * length, device=query.device).view(batch * heads, length)
            order = torch.arange(length, device=query.device).expand(batch * heads, length)
            if length > self.chunk_length:
                if self.num_buckets is None:
                    self._set_num_buckets(length)
                if buckets is None:
                    buckets = self._hash_vectors(query, rounds, attention_mask)
                sort = self._get_sorted_bucket_idx_and_undo_sorted_bucket_idx
                order = sort(length, buckets.view(batch, heads, -1), rounds)[0].flatten(0, 1) % length
                buckets = buckets.view(batch, heads, rounds, -1)
            mask = None if attention_mask is None else attention_mask.repeat_interleave(heads, 0).gather(1, order)
            graph = _chunk_graph(self, nodes.gather(1, order), mask, length)
            query, key, value = (x.reshape(-1, 1, x.shape[-1]) for x in (query, key, value))
        else:
            query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = ops.attend(
            drop_self_loops(graph), query, key, value, scale=1.0, dropout=self.dropout if self.training else 0.0
        )
        if own_graph_per_head:
            out = out.view(batch, heads, length, -1).transpose(1, 2)
        return reformer.LSHSelfAttentionOutput(out.reshape(batch, length, -1), (), buckets)


def _has_states(layer: Any, past: Any) -> bool:
    """Whether a cache holds states of this layer; transformers' own code then computes one more token."""
    cached = past is not None and len(past) > layer.layer_idx
    if cached and topology_of(layer) is not None:
        raise ValueError("a Reformer over a topology keeps no cache; generate with use_cache=False")
    return cached


def _topology_graph(
    layer: Any, attention_mask: Tensor | None, batch: int, length: int, device: torch.device
) -> Graph | None:
    """The graph of `config.mpnn_graph` over all sentences, one after the other; None without one."""
    topology = topology_of(layer)
    if topology is None:
        return None
    keep = None if attention_mask is None else attention_mask.bool()
    mask = Mask(batch, Sizes(length, length), _CAUSAL if layer.is_decoder else _COMPLETE, keep)
    return mask.graph(Instead(topology, must_be_causal(layer)), batch, length, device, flat=True)[0]


def _chunk_graph(layer: Any, order: Tensor, attention_mask: Tensor | None, length: int) -> Graph:
    """The graph over chunks of lists of nodes [lists, rounds * length], padding left out."""
    order = order if attention_mask is None else torch.where(attention_mask.bool(), order, -1)
    count = len(order) * length
    if length <= layer.chunk_length:
        graph = chunks(order, length, count, before=0)
    else:
        before = layer.num_chunks_before
        after = layer.num_chunks_after
        graph = chunks(order, layer.chunk_length, count, before=before, after=after)
    return selected(graph, graph.edge_index[0] <= graph.edge_index[1]) if layer.is_decoder else graph


class MPNetEncoder(mpnet.MPNetEncoder):
    """MPNet (Song et al. 2020), whose layers share a bias by offset."""

    def compute_position_bias(self, x: Tensor, position_ids: Any = None, num_buckets: int = 32) -> Any:
        if position_ids is not None or not passes_on(self, mpnet.MPNetSelfAttention):
            return super().compute_position_bias(x, position_ids, num_buckets)
        bucket = partial(self.relative_position_bucket, num_buckets=num_buckets)
        return OffsetBias(self.relative_attention_bias, bucket, 128, x.shape[1], x.shape[1], 0)


class MPNetAttention(mpnet.MPNetSelfAttention):
    """MPNet: complete, with the encoder's bias."""

    is_causal = False

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_bias: Any = None,
        output_attentions: bool = False,
        **options: Any,
    ) -> Any:
        query, key, value = (_heads(to(hidden_states), self.num_attention_heads) for to in (self.q, self.k, self.v))
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            position_bias=position_bias,
            dropout=_dropout(self, self.dropout),
            is_causal=False,
            output_attentions=output_attentions,
        )
        out = self.o(out.flatten(2))
        return (out, weights) if output_attentions else (out,)


class GPTJAttention(gptj.GPTJAttention):
    """GPT-J (Wang and Komatsuzaki 2021): causal, with rotary embeddings of a part of each head."""

    def forward(
        self,
        hidden_states: Tensor,
        layer_past: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **options: Any,
    ) -> Any:
        heads, width = self.num_attention_heads, self.head_dim
        query, key = (self._split_heads(to(hidden_states), heads, width, True) for to in (self.q_proj, self.k_proj))
        value = _heads(self.v_proj(hidden_states), heads)
        table = self._get_embed_positions(position_ids)
        at = position_ids[..., None].expand(-1, -1, table.shape[-1])
        sin, cos = table.gather(1, at).to(key.dtype).chunk(2, -1)
        turned = self.rotary_dim or width
        query, key = (
            torch.cat([gptj.apply_rotary_pos_emb(x[..., :turned], sin, cos), x[..., turned:]], -1).transpose(1, 2)
            for x in (query, key)
        )
        key, value = _with_past(self, layer_past, key, value)
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=1 / self.scale_attn,
            dropout=_dropout(self, self.attn_dropout),
            output_attentions=output_attentions,
        )
        return self.resid_dropout(self.out_proj(out.flatten(2))), weights


class FalconAttention(falcon.FalconAttention):
    """Falcon (Almazrouei et al. 2023): causal, with rotary embeddings or ALiBi, and shared keys."""

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Any = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        if alibi is None:
            query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = _with_past(self, layer_past, key, value)
        if alibi is not None:
            query, key = _with_key_bias(query, key, alibi.view(len(query), self.num_heads, 1, -1))
        topology = topology_of(self)
        mask = attention_mask
        if isinstance(mask, Tensor):  # bools, or, with ALiBi, its sums with the smallest number
            # The dtype of `alibi` has the smallest number of the sums.
            least = None if mask.dtype == torch.bool else torch.finfo(mask.dtype).min

            def build() -> Mask:
                allowed = mask if least is None else (mask > least).any(1, keepdim=True)
                return _over_topology(allowed, topology, key.shape[2] - query.shape[2])

            mask = _cached(attention_mask, build, topology)
        elif topology is not None:
            mask = _over_topology(mask.dense(), topology, key.shape[2] - query.shape[2])
        out, weights = attend(
            _PLAIN,
            query,
            key,
            value,
            mask,
            scaling=self.head_dim**-0.5,
            dropout=0.0 if alibi is None else _dropout(self, self.attention_dropout),
            output_attentions=output_attentions,
        )
        return self.dense(out.flatten(2)), weights


class BloomAttention(bloom.BloomAttention):
    """BLOOM (Le Scao et al. 2022): causal, with ALiBi."""

    is_causal = True

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        key, value = _with_past(self, layer_past, key, value)
        bias = alibi.view(len(query), self.num_heads, 1, -1) * (self.beta / self.inv_norm_factor)
        query, key = _with_key_bias(query, key, bias)
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=_dropout(self, self.attention_dropout),
            output_attentions=output_attentions,
        )
        out = self.dense(out.flatten(2))
        return bloom.dropout_add(out, residual, self.hidden_dropout, self.training), weights


class MptBlock(mpt.MptBlock):
    """Refuses weights, which transformers' block does not ask its attention for."""

    def forward(self, *args: Any, output_attentions: bool = False, **options: Any) -> Any:
        _refuse_weights(self, output_attentions)
        return super().forward(*args, **options)


class MptAttention(mpt.MptAttention):
    """MPT (MosaicML 2023): causal, with ALiBi."""

    is_causal = True

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor | None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (_heads(x, self.n_heads) for x in mixed.chunk(3, 2))
        key, value = _with_past(self, past_key_values, key, value)
        scale: Any = self.softmax_scale
        if position_bias is not None:
            bias = position_bias[None, ..., max(0, position_bias.shape[-1] - key.shape[2]) :]
            query, key = _with_key_bias(query, key, bias / scale)
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=scale,
            dropout=self.attn_dropout_p if self.training else 0.0,
        )
        return self.out_proj(out.flatten(2)), weights


class _Disentangled:
    """The attention of all versions of DeBERTa: complete, with biases of content and position, which transformers
    computes for each pair."""

    is_causal = False

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        layer: Any = self
        query, key, value, bias, scale = layer.operands(hidden_states, query_states, relative_pos, rel_embeddings)
        topology = topology_of(layer)
        mask = _cached(attention_mask, lambda: _over_topology(attention_mask.bool(), topology), topology)
        out, weights = attend(
            _PLAIN,
            query,
            key,
            value,
            mask,
            scaling=scale,
            position_bias=bias,
            dropout=_dropout(layer, layer.dropout),
            output_attentions=output_attentions,
        )
        return out.flatten(2), weights


_Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, float]
"""Query, key and value [B, H, N, D], the bias of each pair [B, H, N, N], and the scale."""


class DebertaAttention(_Disentangled, deberta.DisentangledSelfAttention):
    """DeBERTa (He et al. 2021, section 3)."""

    def operands(self, x: Tensor, query_states: Tensor | None, relative_pos: Any, rel_embeddings: Any) -> _Operands:
        if self.talking_head or query_states is not None:
            raise ValueError("a DeBERTa whose heads talk, or with queries of its own, runs by transformers only")
        query, key, value = self.transpose_for_scores(self.in_proj(x)).chunk(3, -1)
        query = query + self.transpose_for_scores(self.q_bias[None, None])
        value = value + self.transpose_for_scores(self.v_bias[None, None])
        factor = 1 + len(self.pos_att_type)
        query = query / deberta.scaled_size_sqrt(query, factor).to(query.dtype)
        if not self.relative_attention or rel_embeddings is None or relative_pos is None:
            return query, key, value, None, 1.0
        table = self.pos_dropout(rel_embeddings)
        return query, key, value, self.disentangled_att_bias(query, key, relative_pos, table, factor), 1.0


class DebertaV2Attention(_Disentangled, deberta_v2.DisentangledSelfAttention):
    """DeBERTa's second and third version (He et al. 2023)."""

    def operands(self, x: Tensor, query_states: Tensor | None, relative_pos: Any, rel_embeddings: Any) -> _Operands:
        heads = self.num_attention_heads
        query = self.transpose_for_scores(self.query_proj(x if query_states is None else query_states), heads)
        key = self.transpose_for_scores(self.key_proj(x), heads)
        factor = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        shape = (-1, heads)
        bias = None
        if self.relative_attention:
            table = self.pos_dropout(rel_embeddings)
            bias = self.disentangled_attention_bias(query, key, relative_pos, table, factor).unflatten(0, shape)
        scale = 1 / float(deberta_v2.scaled_size_sqrt(query, factor))
        return query.unflatten(0, shape), key.unflatten(0, shape), _heads(self.value_proj(x), heads), bias, scale


_OURS: dict[type, type] = {
    kind.__bases__[-1]: kind
    for kind in (
        GPTAttention,
        XLNetAttention,
        LongformerAttention,
        BigBirdAttention,
        BigBirdFull,
        BigBirdBlocks,
        ReformerLocal,
        ReformerLSH,
        MPNetEncoder,
        MPNetAttention,
        GPTJAttention,
        FalconAttention,
        BloomAttention,
        MptBlock,
        MptAttention,
        DebertaAttention,
        DebertaV2Attention,
    )
}
_CONTAINERS = BigBirdAttention, MPNetEncoder, MptBlock
_ADDED = "_added_by_mpnn"
_THEIRS = {ours: original for original, ours in _OURS.items()}
for _original in _OURS:
    compat.check(_original, compat.METHODS.get(_original.__name__, ()))


def is_ours(layer: nn.Module) -> bool:
    """Whether this is an attention layer of mpnn. The others of mpnn contain one."""
    return type(layer) in _THEIRS and type(layer) not in _CONTAINERS


def adapt(model: nn.Module, config: Any) -> None:
    """Gives the attention layers of a model the classes above. They read `config.mpnn_graph`."""
    layers: Counter[type] = Counter()
    for part in model.modules():
        if type(part) in _OURS:
            part.__class__ = kind = _OURS[type(part)]
            added = {"config": config, "layer_idx": layers[kind]}
            added = {name: value for name, value in added.items() if name not in vars(part)}
            vars(part).update(added, **{_ADDED: tuple(added)})
            layers[kind] += 1


def restore(model: nn.Module) -> None:
    """Gives the layers their classes back, and no more attributes than they had."""
    for part in model.modules():
        part.__class__ = _THEIRS.get(type(part), type(part))
        for name in vars(part).pop(_ADDED, ()):
            del vars(part)[name]
