"""Attention in place without a graph: new tokens, short texts and captured calls, against the graphs of their masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import flash
import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mpnn.hf
from mpnn import ops
from mpnn.engine import steps
from mpnn.integrations.hf import by_torch, interface, masks
from mpnn.kernels.dense import varlen

CAUSAL = hf.masking_utils.causal_mask_function
BANDS: dict[str, Any] = {
    "causal": CAUSAL,
    "complete": hf.masking_utils.bidirectional_mask_function,
    "window": hf.masking_utils.sliding_window_causal_mask_function(4),
    "window both ways": hf.masking_utils.sliding_window_bidirectional_mask_function(3),
}
SIZES = {
    "new token": (1, 12, 11, 0),
    "static cache": (1, 12, 6, 0),
    "sliding cache": (1, 7, 11, 5),
    "text": (12, 12, 0, 0),
    "text in a static cache": (9, 12, 0, 0),
    "new tokens": (3, 12, 9, 0),
}  # queries, keys, first query, first key


def features(queries: int, keys: int, heads: int = 4, groups: int = 2) -> list[Tensor]:
    """Query, key and value of a batch of 2, [B, heads, N, 8]."""
    draw = torch.Generator().manual_seed(queries + keys)
    sizes = ((heads, queries), (groups, keys), (groups, keys))
    return [torch.randn(2, h, n, 8, generator=draw, dtype=torch.float64) for h, n in sizes]


def padding(keys: int, padded: int) -> Tensor:
    mask = torch.ones(2, keys, dtype=torch.bool)
    mask[1, :padded] = False
    return mask


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.covering
def test_pairs_are_the_edges_of_the_graph(name: str, size: str, padded: int, groups: int) -> None:
    queries, keys, first_query, first_key = SIZES[size]
    mask = masks.mask(
        2, queries, keys, first_query, first_key,
        mask_function=BANDS[name], attention_mask=padding(first_key + keys, padded),
    )  # fmt: skip
    assert isinstance(mask, masks.Mask)
    query, key, value = features(queries, keys, groups=groups)
    pairs = mask.pairs(keys)
    if queries == 1:
        assert pairs is not None or (padded and size == "static cache" and name == "window")
    if pairs is None:
        return
    out = by_torch.attend(query, key, value, pairs, 0.3, None)
    if out is None:
        out = interface._of_text(query, key, value, pairs, 0.3)
    graph, is_flat = mask.graph(None, 2, keys, query.device)
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    rows = [x.flatten(0, 1) for x in rows] if is_flat else rows
    expected = ops.attend(graph, *rows, scale=0.3, backend="edge_list").view(out.shape)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=6)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
}
SMALL: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
LEFT = padding(9, 4).long()


def pair(name: str) -> tuple[Any, Any]:
    """A model with sdpa attention, and a copy in place."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None, do_sample=False, max_new_tokens=6)
    ours = copy.deepcopy(model)
    mpnn.hf.use(ours)
    return model, ours


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.covering
def test_a_new_token_makes_no_graph_and_no_plan(name: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours = pair(name)
    made: list[int] = []
    graph, choice = masks.Mask.graph, steps.planned

    def counted(self: masks.Mask, *args: Any, **options: Any) -> Any:
        made.append(self.sizes.queries)
        return graph(self, *args, **options)

    def planned(round: Any, *options: Any) -> Any:
        made.append(round.graph.num_dst)
        return choice(round, *options)

    monkeypatch.setattr(masks.Mask, "graph", counted)
    monkeypatch.setattr(steps, "planned", planned)
    options = {"attention_mask": LEFT, "cache_implementation": cache}
    found = ours.generate(IDS, **options)
    assert 1 not in made  # only the prompt, of several queries, may make one
    assert found.equal(model.generate(IDS, **options))


@pytest.mark.parametrize("name", MODELS)
def test_a_text_of_a_batch_does_not_depend_on_the_others(name: str) -> None:
    _, ours = pair(name)
    other = IDS.clone()
    other[0] = other[0].flip(0)
    other[1, :4] = 7  # padding
    a, b = (ours.generate(ids, attention_mask=LEFT) for ids in (IDS, other))
    assert a[1, -6:].equal(b[1, -6:])


def test_a_bias_by_offset_is_computed_once_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    _, ours = pair("t5")
    bucket, computed = T5Attention._relative_position_bucket, []

    def counted(*args: Any, **options: Any) -> Any:
        computed.append(args)
        return bucket(*args, **options)

    monkeypatch.setattr(T5Attention, "_relative_position_bucket", staticmethod(counted))
    ours.generate(IDS, attention_mask=LEFT)
    assert len(computed) <= 6 + 2  # the encoder computes it in each of two layers


# A number read, and results whose size depends on numbers.
LOOKS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive"}
COPIES = {"cpu", "numpy", "tolist", "__array__"}  # which no operator shows while tensors are on a CPU


class Waits(TorchDispatchMode):
    """Notes what would wait for a GPU, or copy to it or from it, on tensors on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.functions = _Copies(self.seen)

    def __enter__(self) -> Waits:
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.functions.__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what stands for a kernel."""
        before = len(self.seen)
        yield
        del self.seen[before:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.overloadpacket.__name__, kwargs or {}
        waits = name in LOOKS or name == "lift_fresh"
        if name == "repeat_interleave":
            waits = options.get("output_size") is None
        if name == "index":
            waits = any(i is not None and i.dtype == torch.bool for i in args[1])
        if waits:
            self.seen.append(name)
        return func(*args, **options)


class _Copies(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in COPIES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CUDA graph were captured, and tensors on a GPU."""
    monkeypatch.setattr(masks, "is_capturing", lambda: True)
    monkeypatch.setattr(masks, "_is_unread", lambda number: True)


def step(name: str, model: Any) -> Callable[[], Tensor]:
    """A call that a CUDA graph captures."""
    if name == "a layer with a padded mask":
        layer = model.model.layers[0].self_attn
        query, key, value = (x.float() for x in features(9, 9))

        def attend() -> Tensor:
            mask = masks.mask(2, 9, 9, mask_function=CAUSAL, attention_mask=LEFT.bool())
            options = {"is_causal": True, "scaling": 0.3}
            attention = hf.AttentionInterface()[model.config._attn_implementation]
            dense = (
                mask
                if model.config._attn_implementation == "mpnn"
                else (hf.masking_utils.sdpa_mask(2, 9, 9, attention_mask=LEFT.bool()))
            )
            return attention(layer, query, key, value, dense, **options)[0] * LEFT[:, :, None, None]

        return attend
    if name == "training":
        return lambda: model(IDS, attention_mask=LEFT, labels=IDS.masked_fill(LEFT == 0, -100), use_cache=False).loss
    cache = hf.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(IDS, attention_mask=LEFT, past_key_values=cache)
    mask = torch.cat([LEFT, LEFT.new_ones(2, 1)], 1)
    start = [layer.cumulative_length.clone() for layer in cache.layers]

    def decode() -> Tensor:
        for layer, length in zip(cache.layers, start, strict=True):
            layer.cumulative_length.copy_(length)
        positions = mask.cumsum(1)[:, -1:] - 1
        with torch.no_grad():
            return model(IDS[:, -1:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits

    return decode


@pytest.mark.parametrize("what", ["a layer with a padded mask", "training", "decoding"])
def test_captured_calls_do_not_wait_for_the_device(what: str, request: pytest.FixtureRequest) -> None:
    model, ours = pair("llama")
    expected = step(what, model)()
    call = step(what, ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3, momentum=0.9)
    request.getfixturevalue("capturing")
    with Waits() as waits:
        found = call()
        if what == "training":
            found.backward()
            torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert waits.seen == []
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_a_padded_batch_is_read_once_and_makes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**SMALL)).eval()
    mpnn.hf.use(model, unpad=True)
    monkeypatch.setattr(masks, "_graph", None)
    with torch.no_grad():
        model(IDS, attention_mask=LEFT)
        with Waits() as waits:
            model(IDS, attention_mask=LEFT)
    assert waits.seen.count("cpu") == 1
    assert not LOOKS & set(waits.seen)


class Operations(TorchDispatchMode):
    """Counts operations that launch something: views do not."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += func.overloadpacket.__name__ != "view" and not func.is_view
        return out


def test_a_batch_without_its_padding_launches_no_more_than_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: torch's kernel for packed texts is one operation, and stands here for one that returns its queries."""
    monkeypatch.setattr(by_torch.varlen, "runs_here", lambda *_: True)
    monkeypatch.setattr(by_torch.varlen, "packed", lambda query, *_: query.clone())
    counts = []
    for in_place in (False, True):
        model = hf.BertModel(hf.BertConfig(**SMALL)).eval()
        if in_place:
            mpnn.hf.use(model, unpad=True)
        with torch.no_grad():
            model(IDS, attention_mask=LEFT)
            with Operations() as operations:
                model(IDS, attention_mask=LEFT)
        counts.append(operations.count)
    theirs, ours = counts
    assert ours <= theirs


BATCHES: dict[str, dict[str, Tensor]] = {
    "padded": {"input_ids": IDS, "attention_mask": LEFT},
    "packed": {"input_ids": IDS[:1], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])},
}


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_on_a_gpu_is_one_launch_a_layer_and_one_graph_a_pass(
    batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU in 16 bits; torch's kernel for packed texts is imitated by a loop over texts."""
    model, ours = pair("llama")
    launched: list[int] = []
    made: list[int] = []

    def packed(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        launched.append(len(query))
        with waits.paused():
            return flash.packed(query, *arguments, **options)

    graph = masks._graph

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return graph(*arguments)

    monkeypatch.setattr(varlen, "runs_here", lambda *_: True)
    monkeypatch.setattr(varlen, "packed", packed)
    monkeypatch.setattr(masks, "_graph", counted)
    # As the plan chooses on a GPU; with gradients, because without them other kernels of a CPU run whole layers.
    monkeypatch.setattr(ops, "attend", partial(ops.attend, backend="dense"))
    options = BATCHES[batch] | {"use_cache": False}
    waits = Waits()
    expected = model(**options).logits
    ours(**options)
    launched.clear()
    made.clear()
    with waits:
        found = ours(**options).logits
    real = LEFT[: len(found)].bool() if batch == "padded" else torch.ones(found.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-6)
    assert len(launched) == ours.config.num_hidden_layers
    assert len(made) <= 1
    if batch == "padded":
        assert waits.seen == ["cpu", "numpy"]  # one copy for all layers
    else:
        assert waits.seen.count("numpy") == 2  # the numbers of texts and positions that the mask reads, for all layers


def test_packed_sequences_of_known_lengths_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (x[:1] for x in features(9, 9))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    options = {"cu_seq_lens_k": ends, "cu_seq_lens_q": ends, "max_length_k": 5, "max_length_q": 5, "scaling": 0.3}
    layer = pair("llama")[1].model.layers[0].self_attn
    for name in ("causal", "complete"):
        expected, _ = interface.attend(
            layer, query, key, value, masks.mask(1, 9, 9, mask_function=BANDS[name]), **options
        )
        given: list[Any] = []

        def unread(*arguments: Any, given: list[Any] = given) -> Tensor:
            given.extend(arguments)
            return arguments[0]

        with monkeypatch.context() as patch, Waits() as waits:
            patch.setattr(by_torch.varlen, "runs_here", lambda *_: True)
            patch.setattr(by_torch.varlen, "packed", unread)
            interface.attend(layer, query, key, value, masks.mask(1, 9, 9, mask_function=BANDS[name]), **options)
        assert waits.seen == []
        torch.testing.assert_close(flash.packed(*given)[None], expected, rtol=0, atol=1e-12)


@pytest.fixture
def fresh() -> Iterator[None]:
    """No programs of other tests, which count against the limit of compilations."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.sample(2)
def test_one_program_computes_new_tokens_of_a_static_cache(name: str) -> None:
    found = []
    for model, compiled in zip(pair(name), (False, True), strict=True):
        call = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else model
        cache, mask = hf.StaticCache(config=model.config, max_cache_len=16), LEFT
        with torch.no_grad():
            model(IDS, attention_mask=LEFT, past_key_values=cache)
            for _ in range(4):
                mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
                whole = torch.nn.functional.pad(mask, (0, 16 - mask.shape[1]))
                positions = mask.cumsum(1)[:, -1:] - 1
                options = {"attention_mask": whole, "position_ids": positions, "past_key_values": cache}
                found.append(call(IDS[:, -1:], **options).logits)
    torch.testing.assert_close(torch.stack(found[4:]), torch.stack(found[:4]), rtol=0, atol=2e-6)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.slow
def test_programs_for_a_gpu_call_torch_s_kernel(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours = pair(name)
    given = masks.Mask.pairs_in_program
    monkeypatch.setattr(masks.Mask, "pairs_in_program", lambda self, keys, on_gpu: given(self, keys, True))
    names: list[str] = []

    def backend(program: Any, inputs: Any) -> Any:
        names.extend(str(node.target) for node in program.graph.nodes)
        return program

    ids, options = IDS[:, -5:], {"attention_mask": LEFT[:, -6:-1] if padded else torch.ones(2, 5).long()}
    with torch.no_grad():
        found = torch.compile(ours, backend=backend, fullgraph=True)(ids, **options, use_cache=False).logits
        expected = model(ids, **options, use_cache=False).logits
    real = options["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-6)
    assert not [name for name in names if "mpnn" in name]


def test_what_waits_is_noticed() -> None:
    x = torch.arange(3.0)
    calls: list[Callable[[], Any]] = [
        lambda: x.sum().item(), lambda: bool(x.sum()), lambda: x[x > 1], lambda: x.nonzero(), lambda: torch.tensor(1.0),
        lambda: x.repeat_interleave(x.long()), lambda: x.cpu(), lambda: x.numpy(), lambda: x.tolist(),
    ]  # fmt: skip
    for call in calls:
        with Waits() as waits:
            call()
        assert len(waits.seen) >= 1
    with Waits() as waits:
        (x * 2).double().sum()
    assert waits.seen == []


@pytest.mark.usefixtures("capturing")
def test_graphs_that_captured_calls_cannot_make_are_refused() -> None:
    _, ours = pair("llama")
    mpnn.hf.use(ours, "causal() & window(3)")
    with torch.no_grad():
        ours(IDS)  # no number decides this graph
        with pytest.raises(ValueError, match="pass no attention_mask if there is no padding"):
            ours(IDS, attention_mask=LEFT)


def test_recorded_layers_make_their_graphs() -> None:
    _, ours = pair("llama")
    seen: list[Any] = []
    with torch.no_grad(), mpnn.hf.record(lambda graph, weights: seen.append(graph)):
        ours(IDS)
    assert len(seen) == 2
    assert interface._RECORDER.get() is None
