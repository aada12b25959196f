"""XLNet of transformers as message passing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.topology import Topology
from mpnn.graphs import complete, documents, from_edges
from mpnn.graphs import memory as with_memory
from mpnn.integrations.hf.arguments import describe, option, refuse, tokens_or_vectors
from mpnn.integrations.hf.modules import Adapter, ids_of, mask_of
from mpnn.integrations.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.models.layers.packing import require_eager, token_mask
from mpnn.models.layers.relative import PositionOffset
from mpnn.models.text.xlnet import Streams, XLNet, XLNetConfig


def convert(hf_model: Any, graph: Topology | None, copies: Copies) -> XLNetEncoder:
    """An `XLNetModel` as message passing."""
    config = hf_model.config
    check_class(hf_model, "XLNetModel")
    check_config(config, quantization_config=None)
    if config.attn_type not in ("bi", "uni"):
        raise ValueError(f"from_hf does not support config.attn_type = {config.attn_type!r}, only 'bi' and 'uni'")
    ours = XLNetConfig(
        vocabulary=config.vocab_size,
        dim=config.d_model,
        layers=config.n_layer,
        heads=config.n_head,
        hidden=config.d_inner,
        activation=activation(config, "ff_activation"),
        eps=config.layer_norm_eps,
        dropout=config.dropout,
        furthest=config.clamp_len if config.clamp_len > 0 else None,
    )
    return XLNetEncoder(
        with_weights(lambda: XLNet(ours, head=False), hf_model, _NAMES, copies, _as_maps), config, graph
    )


_NAMES = (
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
    (".rel_attn.q", ".attention.to_query.weight"),
    (".rel_attn.k", ".attention.to_key.weight"),
    (".rel_attn.v", ".attention.to_value.weight"),
    (".rel_attn.r", ".attention.to_position.weight"),
    (".rel_attn.o", ".attention.to_out.weight"),
)


def _as_maps(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Maps of transformers are [dim, H, D]; the output map is from [H, D] to dim."""
    if name == "unknown":
        return {name: weight.flatten()}
    if weight.dim() == 3 and name.endswith(".weight"):
        flat = weight.flatten(1)
        return {name: flat if name.endswith("to_out.weight") else flat.T.contiguous()}
    return {name: weight}


class XLNetEncoder(Adapter):
    """An XLNet with the call of transformers."""

    model: XLNet

    def __init__(self, model: XLNet, config: Any, graph: Topology | None) -> None:
        super().__init__(model, config)
        self.graph = graph

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_mems: bool | None = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """One pass over B sentences of at most N tokens; as in transformers, but for what is said here.

        Args:
            input_ids: int64 [B, N]; or inputs_embeds: [B, N, dim], vectors in place of token embeddings.
            attention_mask: [B, N], 1 where there is a token; or input_mask, 1 where there is none.
            mems: for each layer [M, B, dim], cached states, which are sources of all tokens.
            perm_mask: [B, N, N], 1 where token i does not attend to token j; it attends to itself in any case.
            target_mapping: [B, P, N], a single 1 for each prediction, at its token: adds the query stream, which
                attends to what perm_mask allows. A prediction without in-neighbors gets zeros; that of transformers
                attends to all.
            token_type_ids: int64 [B, N], the segments; default: no segments.

        Returns:
            `XLNetModelOutput`, or its tuple: last_hidden_state [B, N or P, dim], mems, hidden_states, attentions. With
            a query stream attentions are pairs of [B, H, N, M + N], the second with zeros where nothing is predicted.

        Raises:
            ValueError, TypeError, IndexError: an invalid argument; the message names it.
        """
        from transformers.models.xlnet.modeling_xlnet import XLNetModelOutput

        others.pop("next_sequence_length", None)  # set by generate()
        refuse(**others)
        tokens = tokens_or_vectors(input_ids, inputs_embeds, self.config.d_model)
        keep = _keep(tokens, attention_mask, input_mask)
        types = ids_of(tokens, token_type_ids, "token_type_ids")
        memory = None if mems is None or mems[0] is None else [m.transpose(0, 1) for m in mems]
        where = None if target_mapping is None else _targets(target_mapping, keep.shape)
        return_weights = option(self.config, "output_attentions", output_attentions)
        found = self._streams(tokens, keep, types, perm_mask, where, memory, return_weights)

        states = [found.content, found.query] if found.query else [found.content]
        with_states = option(self.config, "output_hidden_states", output_hidden_states)
        with_mems = option(self.config, "use_mems_train" if self.training else "use_mems_eval", use_mems)
        new_mems: Any = self._kept(found.content[:-1], memory) if with_mems else None
        output = XLNetModelOutput(
            last_hidden_state=self.model.dropout(found.last),
            mems=new_mems,
            hidden_states=tuple(x for layer in zip(*states, strict=True) for x in layer) if with_states else None,
            attentions=tuple(_attentions(pair, where) for pair in found.weights) if return_weights else None,
        )
        return self.answer(output, return_dict)

    def _streams(
        self,
        tokens: Tensor,
        keep: Tensor,
        types: Tensor | None,
        perm_mask: Tensor | None,
        where: Tensor | None,
        memory: list[Tensor] | None,
        return_weights: bool,
    ) -> Streams:
        """Both streams; `where` int64 [B, P]: the tokens that are predicted."""
        require_eager("masks, segments, memory and permutations decide the graph")
        h = self.model.embed(tokens)
        before = _memory_length(memory, h, len(self.model.layers))
        if perm_mask is None and where is None and self._is_regular(types, before) and bool(keep.all()):
            shared = self._shared(h.shape[0], h.shape[1], before, types).to(h.device)
            return self.model.streams(h, shared, memory=memory, return_weights=return_weights)
        mask = self._attention_mask(keep, before, perm_mask)
        itself = torch.eye(keep.shape[1], dtype=torch.bool, device=h.device)
        places = self._places(keep.shape, before, types, h.device)
        own = places[..., before:]
        content = _graph(torch.cat([mask[..., :before], mask[..., before:] | itself], -1), own, places)
        if where is None:
            return self.model.streams(h, content, memory=memory, return_weights=return_weights)
        rows = mask.gather(1, where[..., None].expand(-1, -1, mask.shape[2]))
        query = _graph(rows, own.gather(2, where.expand(len(own), -1, -1)), places)
        g = self.model.queries(*where.shape)
        return self.model.streams(h, content, g, query, memory, return_weights=return_weights)

    def _is_regular(self, types: Tensor | None, before: int) -> bool:
        """Whether the edges follow a rule, so that no list of edges is needed."""
        config = self.config
        plain = self.graph is None and not config.bi_data and not (config.attn_type == "uni" and config.same_length)
        return plain and (types is None or (before == 0 and config.attn_type == "bi"))

    def _shared(self, batch: int, length: int, before: int, types: Tensor | None) -> Graph:
        """One graph for all sentences or, where tokens have segments, a clique for each."""
        if types is None:
            return _one_way(length, before) if self.config.attn_type == "uni" else _all(length, before)
        at = self._places((batch, length), 0, types, types.device).flatten(1)
        cliques = documents([length] * batch).bind(batch * length)
        return cliques.with_relation(PositionOffset(max(0, length - 1), at, at))

    def _attention_mask(self, keep: Tensor, before: int, perm_mask: Tensor | None) -> Tensor:
        """The sources of each token, itself only if no mask forbids it: bool [B, N, M + N]."""
        batch, length = keep.shape
        if self.graph is None:
            own = keep[:, None, :].expand(-1, length, -1)
        else:
            own = keep.new_zeros(batch, length, length)
            for b in range(batch):
                there = keep[b].nonzero().squeeze(1)
                own[b, there[:, None], there] = self.graph.bind(len(there)).dense().to(keep.device)
        if perm_mask is not None:
            if perm_mask.shape != own.shape:
                raise ValueError(
                    f"perm_mask must be [batch, length, length] = {[*own.shape]}; got {describe(perm_mask)}"
                )
            own = own & (perm_mask == 0)
        mask = torch.cat([keep.new_ones(batch, length, before), own], -1)
        if self.config.attn_type == "uni":
            mask = mask.tril(before)
            if self.config.same_length:
                mask = mask.triu()
        return mask

    def _places(self, shape: Sequence[int], before: int, types: Tensor | None, device: torch.device) -> Tensor:
        """The position of each source, int64 [1, B, M + N], and its segment if there are types, [2, B, M + N]."""
        place = torch.arange(-before, shape[1], device=device).expand(shape[0], -1)
        if self.config.bi_data:  # the second half of a batch is read backwards
            if shape[0] % 2:
                raise ValueError(f"config.bi_data takes batches of two halves, the second reversed; got {shape[0]}")
            place = torch.cat([place[: shape[0] // 2], -place[shape[0] // 2 :]])
        if types is None:
            return place[None]
        cached = types.new_zeros(shape[0], before)  # cached states count as the first segment
        return torch.stack([place, torch.cat([cached, types], 1)])

    def _kept(self, states: Sequence[Tensor], memory: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """The states of each layer to cache for the next segment, [M', B, dim]."""
        reuse, most = self.config.reuse_len or None, self.config.mem_len or None
        new = [h[:, :reuse] for h in states]
        joined = new if memory is None else [torch.cat(pair, 1) for pair in zip(memory, new, strict=True)]
        return tuple(m[:, -most if most else 0 :].transpose(0, 1).detach() for m in joined)


@cached_graph
def _all(length: int, before: int) -> Graph:
    """Each token attends to all tokens and to the memory."""
    return Graph.from_runs(complete().bind(length, before + length).runs, shift=before)


def _one_way(length: int, before: int) -> Graph:
    """Each token attends to the memory and to the tokens up to itself."""
    return with_memory(before).bind(length)


def _graph(mask: Tensor, dst: Tensor, src: Tensor) -> Graph:
    """All sentences as one graph, from their masks, bool [B, P, S], and positions, [..., B, P] and [..., B, S]."""
    sentence, i, j = mask.nonzero().unbind(1)
    _, rows, columns = mask.shape
    edges = torch.stack([sentence * columns + j, sentence * rows + i])
    graph = from_edges(edges, num_src=src[0].numel(), num_dst=dst[0].numel())
    return graph.with_relation(PositionOffset(max(0, columns - 1), dst.flatten(1), src.flatten(1)))


def _keep(tokens: Tensor, attention_mask: Tensor | None, input_mask: Tensor | None) -> Tensor:
    """Which places hold tokens, bool [B, N]."""
    if attention_mask is not None and input_mask is not None:
        raise ValueError("attention_mask and input_mask say the same, one the reverse of the other; give one of them")
    keep, padding = mask_of(tokens, attention_mask), mask_of(tokens, input_mask, "input_mask")
    if padding is not None:
        return ~padding
    return token_mask(tokens) if keep is None else keep


def _memory_length(memory: list[Tensor] | None, h: Tensor, layers: int) -> int:
    """The number of cached states."""
    if memory is None:
        return 0
    before = memory[0].shape[1]
    shapes = {tuple(m.shape) for m in memory}
    if len(memory) != layers or shapes != {(h.shape[0], before, h.shape[2])}:
        raise ValueError(
            f"mems must hold a tensor [M, {h.shape[0]}, {h.shape[2]}] for each of {layers} layers; got {len(memory)}, "
            f"of shapes {sorted((m, b, d) for b, m, d in shapes)}"
        )
    return before


def _targets(mapping: Tensor, shape: Sequence[int]) -> Tensor:
    """The token that each prediction is of, int64 [B, P]."""
    batch, length = shape
    if mapping.dim() != 3 or mapping.shape[0] != batch or mapping.shape[2] != length:
        raise ValueError(f"target_mapping must be [{batch}, predictions, {length}]; got {describe(mapping)}")
    single = (mapping.sum(2) == 1) & (mapping.amax(2) == 1)
    if not bool(single.all()) or bool((mapping.sum(1) > 1).any()):
        raise ValueError("target_mapping must hold a single 1 for each prediction, each at another token")
    return mapping.argmax(2)


def _attentions(pair: tuple[Tensor, ...], where: Tensor | None) -> Any:
    """A layer's weights as transformers gives them: those of predictions in the rows of their tokens."""
    content = pair[0]
    if where is None:
        return content
    batch, predictions = where.shape
    rows = torch.zeros_like(content)
    sentence = torch.arange(batch, device=where.device)[:, None].expand(batch, predictions)
    rows[sentence, :, where] = pair[1].movedim(1, 2)
    return content, rows
