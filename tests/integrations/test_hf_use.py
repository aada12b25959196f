"""`mpnn.hf`: models of transformers over graphs, in place, against their own eager attention."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import forked
import pytest
import torch
import transformers as hf
from hf_families import DECODER, DECODERS, ENCODER, ENCODERS, IDS, LEFT, RIGHT, VISION, output, recompute, tiny
from torch import Tensor

import mpnn.hf
from mpnn import graphs
from mpnn.integrations.hf import interface, masks

# float32 sums of at most 60 terms through two layers; the families agree to 1e-6, the bar is 1e-5
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules whose attention ran by mpnn."""
    modules: list[Any] = []

    def counted(module: Any, *args: Any, **options: Any) -> Any:
        modules.append(module)
        return interface.attend(module, *args, **options)

    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "mpnn", counted)
    return modules


def elsewhere(script: str, folder: Any) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own."""
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_every_family_computes_what_eager_does(name: str, calls: list[Any]) -> None:
    model = tiny(name)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = output(model)
        assert not calls
        mpnn.hf.use(model)
        found = output(model)
    assert len(set(calls)) >= 2
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.sample(3)
def test_the_same_tokens_are_generated_with_padding_on_the_left(name: str, cache: str) -> None:
    model = tiny(name)
    options = {"attention_mask": LEFT, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    model.set_attn_implementation("eager")
    expected = model.generate(IDS, cache_implementation=cache, **options)
    mpnn.hf.use(model)
    assert model.generate(IDS, cache_implementation=cache, **options).equal(expected)


@pytest.mark.parametrize("name", ["llama with beams", "llama with an assistant", "t5", "bart"])
def test_other_ways_to_generate(name: str) -> None:
    def tokens(attention: str) -> Tensor:
        model = tiny(name.split()[0])
        model.set_attn_implementation(attention)
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        if "assistant" in name:
            torch.manual_seed(1)
            assistant = DECODERS["llama"]().eval()
            assistant.set_attn_implementation(attention)
            return model.generate(IDS[:1], assistant_model=assistant, **options)
        padding = RIGHT if model.config.is_encoder_decoder else LEFT
        return model.generate(IDS, attention_mask=padding, num_beams=3 if "beams" in name else 1, **options)

    assert tokens("mpnn").equal(tokens("eager"))


@pytest.mark.parametrize("keep", [2048, 5])
def test_doge_computes_with_its_mask_in_each_step(keep: int) -> None:
    torch.manual_seed(0)
    model = hf.DogeForCausalLM(hf.DogeConfig(**DECODER, keep_window_size=keep)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    options = {"attention_mask": LEFT, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    model.set_attn_implementation("eager")
    expected = model.generate(IDS, **options)
    mpnn.hf.use(model)
    assert model.generate(IDS, **options).equal(expected)
    with pytest.raises(AttributeError, match="'masked_fill': this model computes with its mask"):
        masks.mask(1, 4, 4).masked_fill(None, 0.0)
    with pytest.raises(TypeError, match=r"torch\.add: this model computes with its mask"):
        torch.add(torch.ones(4, 4), masks.mask(1, 4, 4))
    for compute in (lambda mask: 1.0 - mask, lambda mask: mask * 2, lambda mask: 0.0 + mask, lambda mask: ~mask):
        with pytest.raises(TypeError, match="this model computes with its mask"):
            compute(masks.mask(1, 4, 4))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_gradients_with_checkpointing(name: str) -> None:
    model = tiny(name).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for rate in ("attention_dropout", "dropout", "dropout_prob"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    recompute(model)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        output(model).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.set_attn_implementation("eager")
    expected = gradients()
    mpnn.hf.use(model)
    found = gradients()
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("family", ["T5", "MT5"])
def test_position_biases_are_tables_by_offset(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(
        vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=6,
    )  # fmt: skip
    model = getattr(hf, f"{family}ForConditionalGeneration")(config).train()
    weights = [p for name, p in model.named_parameters() if "relative_attention_bias" in name]
    found = []
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "output_scores": True}
    for attention in ("eager", "mpnn"):
        if attention == "mpnn":
            handle = mpnn.hf.use(model)
            monkeypatch.setattr(interface, "_per_edge", None)  # what takes dense biases
        else:
            model.set_attn_implementation("eager")
        logits = model(IDS, attention_mask=RIGHT, decoder_input_ids=IDS[:, :15]).logits
        gradients = torch.autograd.grad(logits.square().sum(), weights)
        masked = {"attention_mask": RIGHT, "return_dict_in_generate": True} | options
        found.append((logits, *gradients, *model.generate(IDS, **masked).scores))
    for ours, reference in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-5 * max(1.0, float(reference.detach().abs().max())))
    assert all("compute_bias" not in vars(module) for module in handle.restore().modules())


def test_packed_sequences_attend_within_themselves() -> None:
    model = tiny("mistral")
    mpnn.hf.use(model)
    first, second = IDS[:1, :10], IDS[1:, :9]
    positions = torch.cat([torch.arange(10), torch.arange(9)])[None]
    with torch.no_grad():
        packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(x).logits for x in (first, second)], 1)
    torch.testing.assert_close(packed, alone, **CLOSE)
    lengths = torch.tensor([0, 10, 19], dtype=torch.int32)
    with torch.no_grad():
        same = model(
            torch.cat([first, second], 1), position_ids=positions, use_cache=False, cu_seq_lens_q=lengths,
            cu_seq_lens_k=lengths,
        ).logits  # fmt: skip
    torch.testing.assert_close(same, alone, **CLOSE)


def test_a_window_as_a_graph_is_the_window_of_the_model() -> None:
    windowed = tiny("mistral")
    windowed.set_attn_implementation("eager")
    full = hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=None)).eval()
    full.load_state_dict(windowed.state_dict())
    handle = mpnn.hf.use(full, "causal() & window(5)")
    options = {"attention_mask": LEFT, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        torch.testing.assert_close(output(full), output(windowed), **CLOSE)
    assert full.generate(IDS, **options).equal(windowed.generate(IDS, **options))
    before = handle.restore()
    assert before is full
    assert full.config._attn_implementation == "sdpa"
    assert getattr(full.config, "mpnn_graph", None) is None
    assert "attn_implementation" not in full.config.to_dict()


def test_a_graph_for_each_layer() -> None:
    model, x = tiny("llama"), IDS
    by_number = {0: "causal() & window(3)", 1: graphs.causal()}
    with torch.no_grad():
        causal = model(x).logits
        mpnn.hf.use(model, by_number)
        narrow = model(x).logits
        mpnn.hf.use(model, lambda layer: by_number[layer])
        torch.testing.assert_close(model(x).logits, narrow)
        mpnn.hf.use(model, lambda layer: None)
        torch.testing.assert_close(model(x).logits, causal, **CLOSE)
    assert float((narrow - causal).abs().max()) > 1e-3
    assert model.config.mpnn_graph == {}
    typed = tiny("gemma3")
    mpnn.hf.use(typed, {"full_attention": "causal() & window(4)"})
    assert typed.config.mpnn_graph == {"full_attention": "causal() & window(4)"}
    with torch.no_grad():
        as_windows = typed(IDS).logits
        mpnn.hf.use(typed, {"1": "causal() & window(4)"})  # its second layer is the one with full attention
        torch.testing.assert_close(typed(IDS).logits, as_windows)


ROLES = {"encoder": "window(2)", "decoder": "causal() & window(3)", "cross": "window(4) | global_nodes([0])"}


def seen(model: Any) -> dict[str, Tensor]:
    """Which pairs each attention of an encoder-decoder weighs, from its returned weights."""
    if model.main_input_name == "input_features":
        inputs = {"input_features": torch.linspace(-1, 1, 2 * 8 * 40).view(2, 8, 40)}
    else:
        inputs = {"input_ids": IDS, "attention_mask": LEFT}
    with torch.no_grad():
        out = model(**inputs, decoder_input_ids=IDS[:, :9], output_attentions=True)
    weights = {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions}
    return {role: torch.stack(layers).sum((0, 2)) > 0 for role, layers in weights.items()}


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_graphs_of_encoders_decoders_and_cross_attention(name: str, tmp_path: Any) -> None:
    own = seen(mpnn.hf.use(tiny(name)).model)
    for role, text in ROLES.items():
        model = tiny(name)
        mpnn.hf.use(model, {role: text})
        found = seen(model)
        shifts = [0, 5] if name != "whisper" and role != "decoder" else [0, 0]  # padding on the left of the sources
        for b, shift in enumerate(shifts):
            rows, columns = found[role].shape[1:]
            first = 0 if role == "cross" else shift
            whole = graphs.parse(text).bind(max(rows, columns)).dense()
            assert found[role][b, first:, shift:].equal(whole[: rows - first, : columns - shift])
            assert not found[role][b, :, :shift].any()
        for other in ROLES.keys() - {role}:
            assert found[other].equal(own[other])
    model = tiny(name)
    mpnn.hf.use(model, ROLES)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.mpnn_graph == ROLES
    with torch.no_grad():
        torch.testing.assert_close(output(loaded), output(model), **CLOSE)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_cross_attention_knows_its_place_in_generation(name: str) -> None:
    model = tiny(name)
    mpnn.hf.use(model, ROLES)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    options |= {"forced_eos_token_id": None, "return_dict_in_generate": True, "output_scores": True}
    inputs = IDS if name != "whisper" else torch.linspace(-1, 1, 2 * 8 * 40).view(2, 8, 40)
    scores = [torch.stack(model.generate(inputs, use_cache=cache, **options).scores) for cache in (False, True)]
    torch.testing.assert_close(scores[1], scores[0], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ", attn_implementation='sdpa'"])
def test_a_saved_model_loads_without_mpnn_only_if_another_attention_is_named(options: str, tmp_path: Any) -> None:
    model = tiny("llama")
    mpnn.hf.use(model, "causal() & window(3)")
    model.save_pretrained(tmp_path)
    script = f"from transformers import AutoModel; print(AutoModel.from_pretrained('.'{options}).config.mpnn_graph)"
    done = elsewhere(script, tmp_path)
    assert (done.returncode == 0) == bool(options)
    if not options:
        assert 'attn_implementation="mpnn"` is not supported' in done.stderr


def test_weights_are_returned() -> None:
    for name in ("llama", "gpt_oss", "bert"):
        model = tiny(name)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = model(IDS, attention_mask=LEFT, output_attentions=True).attentions
            mpnn.hf.use(model)
            found = model(IDS, attention_mask=LEFT, output_attentions=True).attentions
        for ours, reference in zip(found, expected, strict=True):
            rows = LEFT.bool()[:, None, :, None]
            torch.testing.assert_close(ours * rows, reference * rows, **CLOSE)
            assert name != "llama" or not (ours * ~rows).any()  # padding on the left has no in-neighbors


def test_masks_that_are_passed() -> None:
    model = tiny("llama")
    allowed = (torch.rand(2, 1, 17, 17, generator=torch.Generator().manual_seed(0)) < 0.5) | torch.eye(17).bool()
    lowest = torch.zeros(2, 1, 17, 17).masked_fill(~allowed, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, attention_mask=lowest).logits
        mpnn.hf.use(model)
        torch.testing.assert_close(model(IDS, attention_mask=lowest).logits, expected, **CLOSE)
        torch.testing.assert_close(model(IDS, attention_mask=allowed).logits, expected, **CLOSE)


def test_topologies_count_from_the_first_token_that_is_not_padding() -> None:
    model = tiny("llama")
    mpnn.hf.use(model, "causal() & (window(2) | global_nodes(1))")
    with torch.no_grad():
        padded = model(IDS, attention_mask=LEFT, position_ids=(LEFT.cumsum(1) - 1).clamp(min=0)).logits[1, 5:]
        alone = model(IDS[1:, 5:]).logits[0]
    torch.testing.assert_close(padded, alone, **CLOSE)


# ------------------------------------------------------------------------------------------------ traced programs


@pytest.fixture
def fresh() -> None:
    """Forgets the programs of other tests, which count towards torch's limit of recompilations."""
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graph"),
    [
        *((name, None) for name in ("llama", "mistral", "gemma2", "modernbert")),
        *((name, "causal() & window(3)") for name in ("llama", "gpt_oss", "bert")),
    ],
)
def test_one_program_computes_all_lengths(name: str, graph: str | None, fresh: None) -> None:
    model = tiny(name)
    mpnn.hf.use(model, graph)
    program = torch.compile(model, backend="aot_eager", fullgraph=True)
    first = next(model.parameters())
    for length in (17, 9):
        ids, padding = IDS[:, :length], LEFT[:, :length]
        expected, found = (m(ids, attention_mask=padding)[0] for m in (model, program))
        torch.testing.assert_close(found, expected, **CLOSE)
        gradients = [torch.autograd.grad(x.square().mean(), first)[0] for x in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-5 * float(gradients[1].abs().max()))


@pytest.mark.slow
def test_a_program_goes_on_with_a_cache(fresh: None) -> None:
    model = tiny("llama")
    mpnn.hf.use(model)
    program = torch.compile(model, backend="aot_eager", fullgraph=True)
    longer = torch.cat([LEFT, LEFT[:, -1:]], 1)
    logits = []
    with torch.no_grad():
        for run in (model, program):
            cache = run(IDS, attention_mask=LEFT, use_cache=True).past_key_values
            logits.append(run(IDS[:, :1], attention_mask=longer, past_key_values=cache).logits)
    torch.testing.assert_close(*logits, **CLOSE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch, where a program breaks
@pytest.mark.parametrize("name", ["llama without a mask", "llama4", "t5", "swin"])
def test_programs_break_where_numbers_decide_the_graph(name: str, fresh: None) -> None:
    model = tiny(name.split()[0])
    mpnn.hf.use(model)
    program = torch.compile(model, backend="aot_eager")

    def run(call: Any) -> Tensor:
        if "without" in name:
            return call(IDS, use_cache=False).logits
        if name == "llama4":
            return call(IDS, attention_mask=LEFT).logits[LEFT.bool()]
        call.main_input_name, call.config = model.main_input_name, model.config
        return output(call)

    expected, found = run(model), run(program)
    torch.testing.assert_close(found, expected, **CLOSE)
    found.square().mean().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # of transformers
@pytest.mark.parametrize(("name", "strict"), [("mistral", True), ("mistral", False), ("bert", False), ("vit", False)])
def test_exported_programs_run_in_another_process(name: str, strict: bool, tmp_path: Any, fresh: None) -> None:
    model = tiny(name)
    mpnn.hf.use(model, "causal() & window(3)" if name == "mistral" else None)
    model.config.use_cache = False
    dims: dict[int, Any] = {0: torch.export.Dim.DYNAMIC}
    inputs: dict[str, Tensor] = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}
    if name != "vit":
        dims[1] = torch.export.Dim.DYNAMIC
        inputs = {"input_ids": IDS, "attention_mask": LEFT}
    shapes = dict.fromkeys(inputs, dims)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=strict)
    other = {key: x[:, :9] if name != "vit" else x[[0, 1, 1]] for key, x in inputs.items()}
    with torch.no_grad():
        for case in (inputs, other):
            torch.testing.assert_close(program.module()(**case)[0], model(**case)[0], **CLOSE)
        torch.save((other, model(**other)[0]), tmp_path / "case.pt")
    torch.export.save(program, tmp_path / "program.pt2")
    script = tmp_path / "program.py"
    script.write_text(
        "import torch, mpnn.hf, transformers\n"
        "inputs, expected = torch.load('case.pt')\n"
        "found = torch.export.load('program.pt2').module()(**inputs)[0]\n"
        "torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)\n"
    )
    done = forked.run(script, folder=tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr[-2000:]


def test_exports_that_are_refused() -> None:
    model = tiny("llama")
    model.config.use_cache = False
    mpnn.hf.use(model)
    with pytest.raises(ValueError, match="if the call has no attention_mask, pass one"):
        torch.export.export(model, (IDS,), strict=False)
    model = tiny("swin")
    mpnn.hf.use(model)
    with pytest.raises(ValueError, match=r"torch\.export cannot save SwinAttention: its mask is a tensor"):
        torch.export.export(model, (torch.zeros(1, 3, 32, 32),), strict=False)


# ------------------------------------------------------------------------------------------------ refusals


def test_families_that_do_not_dispatch_are_refused() -> None:
    model = hf.RemBertModel(hf.RemBertConfig(**ENCODER))
    with pytest.raises(ValueError, match="the attention of RemBertModel does not dispatch"):
        mpnn.hf.use(model)
    assert model.config._attn_implementation == "eager"


def test_a_graph_that_the_cache_does_not_fit_is_refused() -> None:
    model = tiny("mistral")
    mpnn.hf.use(model, "causal()")
    with pytest.raises(ValueError, match="attends to tokens that this layer's sliding cache no longer has"):
        model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    model = tiny("llama")
    mpnn.hf.use(model, "window(2)", causal=False)
    with pytest.raises(ValueError, match="earlier tokens attend to later ones"):
        model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("name", ["sinks", "cache", "a_new_option"])
def test_keywords_that_may_change_the_result_are_refused(name: str) -> None:
    model = tiny("llama")
    mpnn.hf.use(model)
    with pytest.raises(ValueError, match=rf"LlamaAttention .* \({name}=\), which mpnn does not support"):
        model(IDS, **{name: torch.zeros(1)})
    model(IDS, num_items_in_batch=torch.tensor(3), **{name: None})


@pytest.mark.parametrize("graph", ["causal() & (window(2) | random(3, seed=1))", "causal() & bigbird(4)"])
def test_graphs_that_depend_on_the_length_are_refused(graph: str) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="has other edges for other lengths"):
        mpnn.hf.use(model, graph)
    model.set_attn_implementation("mpnn")
    model.config.mpnn_graph = graph  # as in a checkpoint
    with pytest.raises(ValueError, match="has other edges for other lengths"):
        model(IDS)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("graph", ["window(2)", "complete()", "prefix(3)"])
@pytest.mark.covering
def test_a_decoder_does_not_see_what_it_predicts(name: str, graph: str) -> None:
    model, spec = tiny(name), graph if name != "t5" else {"decoder": graph}
    for change in (mpnn.hf.use, mpnn.models.from_hf):
        with pytest.raises(ValueError, match=r"must not attend to the tokens that it predicts.*causal=False"):
            change(model, spec)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        before = output(model)
        mpnn.hf.use(model, spec, causal=False)
        assert not torch.allclose(output(model), before, atol=1e-3)
        for module in model.modules():
            vars(getattr(module, "config", module)).pop("mpnn_causal", None)
        with pytest.raises(ValueError, match="must not attend to the tokens that it predicts"):
            output(model)


def test_encoders_may_attend_to_later_tokens_and_openai_gpt_may_not() -> None:
    mpnn.hf.use(tiny("bert"), "window(2)")
    gpt = hf.OpenAIGPTLMHeadModel(hf.OpenAIGPTConfig(vocab_size=60, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match="must not attend"):
        mpnn.hf.use(gpt, "window(2)")


def test_a_decoder_over_a_graph_of_one_size_is_checked_when_it_runs() -> None:
    model = tiny("llama")
    mpnn.hf.use(model, "documents([8, 9])")
    with pytest.raises(ValueError, match="must not attend"):
        model(IDS)


def test_a_mask_of_pairs_has_four_dimensions() -> None:
    model = tiny("bert")
    mpnn.hf.use(model)
    pairs = torch.ones(2, 17, 17).tril()
    with pytest.raises(ValueError, match=r"got \[2, 17, 17\]: for pairs, write attention_mask\[:, None\]"):
        model(IDS, attention_mask=pairs)
    model(IDS, attention_mask=pairs[:, None].bool())


@pytest.mark.slow
def test_threads_share_an_encoder_decoder_with_a_cross_topology() -> None:
    model = tiny("bart")
    mpnn.hf.use(model, {"cross": "window(4)"})
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    options |= {"forced_eos_token_id": None, "return_dict_in_generate": True, "output_scores": True}
    starts = [IDS[:1, :length] for length in (1, 3, 5, 7)]

    def scores(start: Tensor) -> Tensor:
        return torch.stack(model.generate(IDS[:1], decoder_input_ids=start, **options).scores)

    expected = [scores(start) for start in starts]
    with ThreadPoolExecutor(4) as pool:
        for alone, together in zip(expected * 4, pool.map(scores, starts * 4), strict=True):
            assert together.equal(alone)


def test_models_without_attention_layers_are_refused() -> None:
    model = hf.FNetModel(hf.FNetConfig(**{**ENCODER, "num_attention_heads": 4}))
    with pytest.raises(ValueError, match="FNetModel has no attention, so there is nothing"):
        mpnn.hf.use(model, "window(3)")
    with pytest.warns(UserWarning, match="FNetModel has no attention layers"):
        hf.FNetModel._from_config(model.config, attn_implementation="mpnn")


def test_each_tower_of_a_model_takes_a_graph_of_its_own() -> None:
    text, vision = {**ENCODER, "max_position_embeddings": 20}, {**VISION}
    clip = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision)).eval()
    pixels = torch.randn(2, 3, clip.config.vision_config.image_size, clip.config.vision_config.image_size)
    towers = (clip.vision_model, {"pixel_values": pixels}), (clip.text_model, {"input_ids": IDS})
    over = {"vision": "window(2) | global_nodes(1)", "text": graphs.causal() & graphs.window(3)}

    def states() -> list[Tensor]:
        with torch.no_grad():
            return [tower(**inputs).last_hidden_state for tower, inputs in towers]

    own = states()
    handle = mpnn.hf.use(clip, over)
    found = states()
    handle.restore()
    assert all(x.equal(y) for x, y in zip(states(), own, strict=True))
    for (tower, _), graph in zip(towers, over.values(), strict=True):
        mpnn.hf.use(tower, graph)
    for one, alone, before in zip(found, states(), own, strict=True):
        torch.testing.assert_close(one, alone, **CLOSE)
        assert not torch.allclose(one, before, **CLOSE)
    with pytest.raises(ValueError, match=r"keys \['vision'\], towers of CLIPModel, and \['0'\]; its towers are"):
        mpnn.hf.use(clip, {"vision": "window(2)", "0": "causal()"})


def test_layers_that_read_the_graph_are_counted() -> None:
    text, vision = {**ENCODER, "max_position_embeddings": 20}, {**VISION}
    clip = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision))
    with pytest.warns(
        UserWarning,
        match=r"2 of the 4 .* CLIPModel read the graph; not CLIPAttention in vision_model\.encoder\.layers$",
    ):
        handle = mpnn.hf.use(clip, "causal() & window(3)", maps=False)
    assert repr(handle) == (
        "Handle of CLIPModel: 2 x CLIPAttention over causal() & window(3); 2 x CLIPAttention over the model's own masks"
    )
    again = mpnn.hf.use(clip, maps=False, layers=False)
    assert repr(again) == (
        "Handle of CLIPModel: 4 x CLIPAttention over the model's own masks; no longer over causal() & window(3), which "
        "use(model, graph=...) sets again"
    )
    handle.restore()
    assert repr(handle) == "Handle of CLIPModel: nothing is changed"
    assert "no longer" not in repr(mpnn.hf.use(clip, maps=False))
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    sam = hf.SamModel(hf.SamConfig(vision_config=tower))
    with pytest.raises(ValueError, match=r"0 of the 7 .* SamModel read the graph; not SamAttention in mask_decoder"):
        mpnn.hf.use(sam, "window(3)")
    gemma = tiny("gemma3")
    gemma.config.layer_types = ["full_attention", "full_attention", "sliding_attention"]  # of which there is none
    with pytest.raises(ValueError, match="0 of the 2 attention layers of Gemma3ForCausalLM read the graph"):
        mpnn.hf.use(gemma, {"sliding_attention": "causal() & window(3)"})


def test_another_attention_after_use_is_what_is_saved(tmp_path: Any) -> None:
    model = tiny("llama")
    handle = mpnn.hf.use(model, "causal() & window(3)")
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    assert "set_attn_implementation" not in vars(handle.restore())


@pytest.mark.slow
def test_a_pickled_decoder_loads_in_another_process(tmp_path: Any) -> None:
    model = tiny("llama")
    mpnn.hf.use(model, "causal() & window(3)")
    torch.save((model, IDS, model(IDS).logits.detach()), tmp_path / "model.pt")
    script = (
        "import torch\n"
        "model, ids, expected = torch.load('model.pt', weights_only=False)\n"
        "torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)\n"
    )
    done = elsewhere(script, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("inner_first", [True, False])
def test_handles_of_nested_models(inner_first: bool) -> None:
    model = tiny("llama")
    with torch.no_grad():
        own = model(IDS).logits
        parts = [model.model, model] if inner_first else [model, model.model]
        first = mpnn.hf.use(parts[0], "causal() & window(3)")
        second = mpnn.hf.use(parts[1], "causal() & window(5)")
        first.restore()  # undoes the second, too
        assert model.config._attn_implementation == "sdpa"
        second.restore()
        assert model(IDS).logits.equal(own)
    assert "mpnn_graph" not in model.config.to_dict()


def test_shapes_on_the_meta_device() -> None:
    model = tiny("llama")
    mpnn.hf.use(model, "causal() & window(3)")
    found = model.to("meta")(IDS.to("meta"), attention_mask=LEFT.to("meta"))
    assert found.logits.shape == (2, 17, 60)


def test_use_after_use_and_back() -> None:
    model = tiny("llama")
    with torch.no_grad():
        own = model(IDS).logits
        first = mpnn.hf.use(model, "causal() & window(3)")
        narrow = model(IDS).logits
        second = mpnn.hf.use(model)  # the model's own masks again
        torch.testing.assert_close(model(IDS).logits, own, **CLOSE)
        second.restore()
        torch.testing.assert_close(model(IDS).logits, narrow)
        third = mpnn.hf.use(model, "causal() & window(5)")
        first.restore()  # undoes the third call, too
        assert model.config._attn_implementation == "sdpa"
        assert getattr(model.config, "mpnn_graph", None) is None
        third.restore()
        first.restore()
        assert model(IDS).logits.equal(own)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_replaced_methods_come_back_after_two_calls(name: str) -> None:
    model = tiny(name)
    names = [set(vars(module)) for module in model.modules()]
    with torch.no_grad():
        own = output(model)
        handles = [mpnn.hf.use(model, unpad=name == "bert") for _ in range(2)]
        torch.testing.assert_close(output(model), own, **CLOSE)
        handles[1].restore()
        torch.testing.assert_close(output(model), own, **CLOSE)
        handles[0].restore()
    assert [set(vars(module)) for module in model.modules()] == names


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_models_that_were_changed_before(name: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    with torch.no_grad():
        for change in (
            lambda model: model.requires_grad_(False),
            lambda model: torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}),
            lambda model: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
            lambda model: model.to(torch.float64),
        ):
            changed = change(tiny(name))
            expected = output(changed)
            mpnn.hf.use(changed)
            torch.testing.assert_close(output(changed), expected, **CLOSE)
        compiled = torch.compile(tiny(name), backend="eager")
        mpnn.hf.use(compiled)
        assert compiled.config._attn_implementation == "mpnn"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    for name in ("llama", "gpt_oss", "bert", "llama, autocast"):
        model = tiny(name.split(",")[0])
        exact = output(model)
        if "autocast" in name:  # rotated queries are float32, values 16 bits
            with torch.autocast("cpu", dtype=dtype):
                found = output(mpnn.hf.use(model).model)
        else:
            found = output(mpnn.hf.use(model.to(dtype)).model)
            assert found.dtype == dtype
        # each of some twenty operations rounds by 2^-9 (bfloat16), which go either way
        torch.testing.assert_close(found.float(), exact, rtol=0, atol=2.0**-5 * float(exact.detach().abs().max()))


def test_a_device_map_and_hooks_of_accelerate(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu", attn_implementation="mpnn")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, **CLOSE)
    encoder = accelerate.cpu_offload(tiny("bert"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="was not replaced"):
        mpnn.hf.use(encoder, unpad=True)


@pytest.mark.filterwarnings("ignore")  # torch.jit warns of numbers and deprecated attributes
def test_jit_is_refused() -> None:
    model = mpnn.hf.use(tiny("bert")).model
    with pytest.raises(ValueError, match=r"torch\.jit\.trace would record the graph of this input for all inputs"):
        torch.jit.trace(model, (IDS,), strict=False)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({9: "causal()"}, "there is no layer type or number 9; there are 0 to 1"),
        ("causal() & windo(3)", "there is no topology 'windo'"),
        ("causal( & window(3)", "at column 9: invalid syntax"),
        (3, "graph must be a topology, its text, a dictionary or a function; got int"),
        ("cuasal()", "cuasal"),
        ({"sliding": "causal()"}, "there is no layer type or number 'sliding'; there are 0 to 1"),
        ({0: 3}, "a graph must be a topology or its text; got int"),
    ],
)
def test_graphs_that_are_none(graph: Any, message: str) -> None:
    model = tiny("llama")
    with pytest.raises((TypeError, ValueError), match=message):
        mpnn.hf.use(model, graph)
    assert model.config._attn_implementation == "sdpa"


def test_a_graph_of_an_encoder_decoder_says_for_which_attention() -> None:
    for graph in ("window(3)", {"encoder": "window(3)", 0: "window(3)"}, {"full_attention": "window(3)"}):
        with pytest.raises(
            ValueError, match="T5ForConditionalGeneration has an encoder, a decoder and cross-attention"
        ):
            mpnn.hf.use(tiny("t5"), graph)
    decoder = hf.BertLMHeadModel(hf.BertConfig(**ENCODER, is_decoder=True, add_cross_attention=True))
    with pytest.raises(ValueError, match="has cross-attention in a decoder of its own"):
        mpnn.hf.use(decoder, "causal()")
    with pytest.raises(TypeError, match="must be a PreTrainedModel"):
        mpnn.hf.use(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got the class LlamaModel; pass a model"):
        mpnn.hf.use(hf.LlamaModel)  # type: ignore[arg-type]


def test_a_graph_of_another_size_is_refused() -> None:
    size = IDS.shape[1]
    for nodes in (size - 2, size + 2):
        model = tiny("bert")
        mpnn.hf.use(model, graphs.window(2).bind(nodes))
        with torch.no_grad(), pytest.raises(ValueError, match=rf"{nodes} nodes, and .*{size}"):
            output(model)


def test_a_prefix_has_the_edges_that_it_has_in_a_causal_graph() -> None:
    size = IDS.shape[1]
    topology = graphs.causal() & graphs.window(2)
    results = []
    for graph in (topology, topology.bind(size + 2)):
        model = tiny("gpt2")
        mpnn.hf.use(model, graph)
        with torch.no_grad():
            results.append(output(model))
    torch.testing.assert_close(results[0], results[1], **CLOSE)


def test_a_prefix_of_another_graph_is_refused_in_a_decoder() -> None:
    model = tiny("gpt2")
    mpnn.hf.use(model, graphs.window(2).bind(IDS.shape[1] + 2), causal=False)
    with torch.no_grad(), pytest.raises(ValueError, match="never cut"):
        output(model)
