"""Layers of transformers that choose their sources by content: logits, gradients and texts of eager attention."""

from typing import Any

import hf_walk
import pytest
import torch
import transformers as hf
from torch import Tensor

import mpnn.hf
from mpnn.integrations.hf import interface, masks

SIZES = {
    "vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32, "head_dim": 8,
    "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "first_k_dense_replace": 1, "index_topk": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
BLOCKS = {
    "num_key_value_heads": 2, "index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
    "dense_intermediate_size": 32,
}  # fmt: skip
FAMILIES = [
    "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "AXK2ForCausalLM", "HYV4ForCausalLM", "Dots3NoteForCausalLM",
    "MistralLarge4TextModel", "MiniMaxM3VLForCausalLM",
]  # fmt: skip
SOME = [pytest.param(name, marks=[pytest.mark.slow] * (name[:4] not in ("Deep", "Mini"))) for name in FAMILIES]
IDS = torch.arange(3, 43).view(2, 20)


def tiny(name: str, **sizes: Any) -> Any:
    kind = getattr(hf, name)
    model = kind(kind.config_class(**SIZES | (BLOCKS if "MiniMax" in name else {}) | sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def outputs(model: Any, how: str, mask: Tensor | None) -> list[Tensor]:
    """The last states or logits of tokens, and the gradients of all parameters."""
    model.zero_grad()
    model.set_attn_implementation(how)
    result = model(IDS, attention_mask=mask)[0]
    result = result if mask is None else result[mask.bool()]
    result.square().mean().backward()
    return [result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("is_padded", [False, True])
def test_chosen_sources_are_those_of_eager_attention(name: str, is_padded: bool) -> None:
    model, mask = tiny(name), None
    if is_padded:  # MiniMax M3 refuses padding on the left
        mask = torch.ones_like(IDS)
        mask[0, -5:] = 0
        mask = mask if "MiniMax" in name else mask.flip(1)
    eager, ours = (outputs(model, how, mask) for how in ("eager", "mpnn"))
    assert len(eager) == len(ours)
    for one, two in zip(eager, ours, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in SOME if name.values[0].endswith("LM")])
@pytest.mark.parametrize("padding", [0, 5])
def test_chosen_sources_are_decoded_from_the_cache(name: str, padding: int) -> None:
    """Padding on the left, which MiniMax M3 refuses."""
    model, texts, mask = tiny(name), [], torch.ones_like(IDS)
    mask[0, : padding * ("MiniMax" not in name)] = 0
    for how in ("eager", "mpnn"):
        model.set_attn_implementation(how)
        texts.append(model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)


def test_pairs_are_never_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graphs = mpnn.hf.use(tiny("DeepseekV32ForCausalLM")).model, []
    monkeypatch.setattr(masks, "from_dense", lambda *_: pytest.fail("the mask became runs of pairs"))
    with mpnn.hf.record(lambda graph, weights: graphs.append((graph, weights))):
        model(IDS)
    for graph, weights in graphs:
        assert graph.num_edges == 2 * sum(min(i + 1, SIZES["index_topk"]) for i in range(20))
        assert weights.shape == (graph.num_edges, 4)


def test_a_graph_of_the_user_is_refused_where_the_mask_is_a_tensor() -> None:
    with pytest.raises(ValueError, match="which a topology cannot replace"):
        mpnn.hf.use(tiny("DeepseekV32ForCausalLM"), "causal() & window(3)").model(IDS)


def test_a_graph_of_the_user_is_refused_where_the_choice_is_a_mask() -> None:
    """GLM5-Next makes a mask of its choice, which other families pass on as indices."""
    model = hf_walk.tiny(hf.Glm5NextForConditionalGeneration)
    with pytest.warns(UserWarning, match=r"; not Glm5NextVisionAttention in model\.visual\.blocks"):
        mpnn.hf.use(model, "causal() & window(3)")
    with pytest.raises(ValueError, match="which a topology cannot replace"):
        model(IDS, use_cache=False)


def test_a_mask_of_pairs_limits_the_choice() -> None:
    model, pairs = tiny("DeepseekV32ForCausalLM"), torch.ones(20, 20).tril().bool() & (torch.rand(2, 1, 20, 20) < 0.7)
    pairs |= torch.eye(20, dtype=torch.bool)
    model.set_attn_implementation("eager")
    eager = model(IDS, attention_mask=torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min))
    model.set_attn_implementation("mpnn")
    torch.testing.assert_close(model(IDS, attention_mask=pairs).logits, eager.logits, atol=1e-5, rtol=1e-5)


def test_weights_of_chosen_sources_are_those_of_eager_attention() -> None:
    model, found = tiny("DeepseekV32ForCausalLM"), []
    for how in ("eager", "mpnn"):
        model.set_attn_implementation(how)
        found.append(model(IDS, output_attentions=True).attentions[1])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["padded", "generated", "packed"])
def test_blocks_that_begin_at_slots_refuse_texts_that_do_not(case: str) -> None:
    """Blocks of MiniMax M3 begin at slots: a text elsewhere would get others than alone, and nobody would notice."""
    model, mask = mpnn.hf.use(tiny("MiniMaxM3VLForCausalLM")).model, torch.ones_like(IDS)
    mask[0, :5] = 0
    calls: dict[str, Any] = {
        "padded": lambda: model(IDS, attention_mask=mask),
        "generated": lambda: model.generate(IDS, attention_mask=mask, max_new_tokens=2),
        "packed": lambda: model(IDS[:1], position_ids=torch.arange(20)[None] % 10, use_cache=False),
    }
    with pytest.raises(
        ValueError, match=r"does not begin at slot 0 .* pad on the right|chooses sources in the whole row"
    ):
        calls[case]()


@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "MiniMaxM3VLForCausalLM"])
def test_packed_sequences_are_refused_where_a_layer_chooses_in_the_whole_row(name: str) -> None:
    ends = torch.tensor([0, 10, 20]).int()
    with pytest.raises(ValueError, match="so packed sequences would get other numbers than alone"):
        mpnn.hf.use(tiny(name)).model(IDS[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False)


def test_blocks_of_unknown_length_are_refused() -> None:
    x, layer = torch.zeros(1, 2, 4, 8), torch.nn.Identity()
    with pytest.raises(ValueError, match=r"has no indexer\.block_size"):
        interface.attend(layer, x, x, x, None, block_indices=torch.zeros(1, 1, 4, 1, dtype=torch.int64))
