"""Models of transformers in place, whose tokens are divided over processes, against the whole sequence in one."""

import os
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from hf_families import recompute, tiny
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from mpnn import hf
from mpnn.distributed import Owners, sharded
from mpnn.integrations.hf import ranks, recurrences

ROOT = Path(__file__).parents[2]
ALL = [
    *("llama", "gpt_oss", "falcon_h1", "gemma3", "qwen3", "mistral"),
    *("qwen2", "gemma2", "olmo2", "phi3", "gpt2", "gpt_neox"),
]
WITH_CACHE = [family for family in ALL if family != "falcon_h1"]


@pytest.mark.parametrize(
    ("count", "families"),
    [
        (2, ["llama", "falcon_h1"]),
        *(pytest.param(n, f, marks=pytest.mark.slow) for n, f in ((2, ALL), (3, ALL[::2]), (5, ALL[1::2]))),
    ],
    ids=["2", "2, all families", "3, every other family", "5, the others"],
)
def test_models_agree_with_one_process(count, families, tmp_path):
    """Logits, the loss and all gradients: blocks, zigzag and uneven parts, a topology instead of the model's masks, and
    padding. The cases are in tests/support/hf_ranks.py."""
    lines = run("hf_ranks", count, families, tmp_path)
    assert lines == 3 * len(families) + ("qwen3" in families)  # 1 for falcon_h1, 5 for llama


@pytest.mark.parametrize(
    ("count", "families"),
    [
        (2, ["llama"]),
        *(pytest.param(n, f, marks=pytest.mark.slow) for n, f in ((2, WITH_CACHE), (3, WITH_CACHE[::2]))),
    ],
    ids=["2", "2, all families", "3, every other family"],
)
def test_they_generate_over_a_divided_cache(count, families, tmp_path):
    """Tokens and logits of every step, and how many keys each process holds: equal and uneven blocks, zigzag, sampling,
    beams, windows, sinks, and a second text after the first. The cases are in tests/support/hf_ranks_generate.py."""
    lines = run("hf_ranks_generate", count, families, tmp_path)
    assert lines == 3 * len(families) + 2 * ("llama" in families)


def run(module, count, families, tmp_path):
    """The number of lines that each process prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    outputs = forked.run_ranks(count, module, tmp_path / "meeting", *families, folder=tmp_path, PYTHONPATH=path)
    (lines,) = {len(out.splitlines()) for out in outputs}
    return lines


def test_every_family_that_is_served_is_compared():
    names = {tiny(name).config.model_type for name in ALL if name != "falcon_h1"}
    assert names | {"falcon_h1"} == ranks.FAMILIES


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_not_served_says_what_to_do(one_process):
    tokens = torch.arange(3, 9)[None]
    llama, bert = tiny("llama"), tiny("bert")
    llama.set_attn_implementation("mpnn")
    with sharded(), pytest.raises(ValueError, match=r"does not know the positions of its tokens: call mpnn.hf.use"):
        llama(tokens)
    for model in (llama, bert):
        hf.use(model)
    with sharded():
        with pytest.raises(ValueError, match="the tokens of BertModel are not divided"):
            bert(tokens)
        with pytest.raises(ValueError, match="sets position_ids itself"):
            llama(tokens, position_ids=tokens)
        with pytest.raises(ValueError, match="model_accepts_loss_kwargs = False of a Trainer"):
            llama(tokens, labels=tokens, num_items_in_batch=5)
        with pytest.raises(ValueError, match="at least one token"):
            llama(tokens[:, :0])
        with pytest.raises(ValueError, match="different padding"):
            llama(tokens.expand(2, -1), attention_mask=torch.ones(2, 6).tril(4))
        with pytest.raises(ValueError, match="returned weights, which are not"):
            llama(tokens, output_attentions=True)
        with pytest.raises(ValueError, match=r"call mpnn\.hf\.use"):
            llama.model(tokens)
    handle = hf.use(tiny("llama"))
    handle.restore()
    assert not handle.model._forward_pre_hooks


def test_what_a_divided_cache_does_not_serve(one_process):
    from hf_ranks import falcon_h1

    tokens = torch.arange(3, 9)[None]
    llama, hybrid = tiny("llama").eval(), falcon_h1().eval()
    for model in (llama, hybrid):
        hf.use(model)
    filled = llama(tokens, use_cache=True).past_key_values
    owned = Owners.of_sizes([5])
    with sharded():
        with pytest.raises(ValueError, match="FalconH1ForCausalLM does not run, since it has recurrent layers"):
            hybrid.generate(tokens, max_new_tokens=2)
        with pytest.raises(ValueError, match="no gradients, dropout or loss"):
            llama(tokens, use_cache=True)
        with torch.no_grad():
            for cache in (filled, StaticCache(llama.config, 9)):
                with pytest.raises(ValueError, match="the first pass takes an empty DynamicCache"):
                    llama(tokens, past_key_values=cache)
            with pytest.raises(ValueError, match="without padding"):
                llama(tokens, attention_mask=tokens != 3, use_cache=True)
            for positions in (tokens, torch.arange(3).repeat(2)[None]):
                with pytest.raises(ValueError, match="numbered from 0"):
                    llama(tokens, position_ids=positions, use_cache=True)
            for option in ({"logits_to_keep": 3}, {"return_dict": False}):
                with pytest.raises(ValueError, match="pass neither logits_to_keep nor return_dict"):
                    llama(tokens, use_cache=True, **option)
            with pytest.raises(ValueError, match="no gradients, dropout or loss"):
                llama(tokens, labels=tokens, use_cache=True)
            cache = llama(tokens, use_cache=True).past_key_values
            with pytest.raises(ValueError, match="assisted decoding runs on one process"):
                cache.crop(-1)
            with sharded(owners=owned), pytest.raises(ValueError, match="6 tokens, and owners of 5"):
                llama(tokens, use_cache=True)
        with pytest.raises(ValueError, match="assisted decoding runs on one process"):
            llama.generate(tokens, max_new_tokens=4, prompt_lookup_num_tokens=2)
        with pytest.raises(ValueError, match="sets position_ids itself"):
            llama.generate(tokens, max_new_tokens=2, use_cache=False)
    with torch.no_grad(), pytest.raises(ValueError, match="this cache is divided over processes"):
        llama(tokens[:, :1], past_key_values=cache)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_scaled_by_the_longest_one_are_refused(one_process, kind):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 4, **factors}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, rope_parameters=rope, **sizes))
    hf.use(model)
    with sharded(), pytest.raises(ValueError, match=f"scaled by the longest one .rope_type='{kind}'"):
        model(torch.arange(3, 9)[None])


def test_layers_are_computed_again_in_the_backward_pass(one_process):
    model, tokens = tiny("llama").train(), torch.arange(3, 9)[None]
    hf.use(model)
    gradients = []
    for _ in range(2):
        with sharded():
            model(tokens, labels=tokens).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        recompute(model)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_recurrence_that_this_library_does_not_run_is_refused(one_process, monkeypatch):
    from hf_ranks import falcon_h1

    model = falcon_h1()
    hf.use(model)
    (layer, *_) = (module for module in model.modules() if type(module).__name__ == "FalconH1Mixer")
    assert recurrences.runs_here(layer)
    with sharded():
        model(torch.arange(3, 9)[None])
        monkeypatch.setattr(layer, "forward", layer.forward)
        with pytest.raises(ValueError, match="run transformers' code, which passes no state"):
            model(torch.arange(3, 9)[None])
