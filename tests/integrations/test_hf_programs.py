"""Converted models in training programs: `torch.compile(fullgraph=True)` and gradient checkpointing compute what eager
calls compute, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_models
import pytest
import torch
from hf_models import BATCH, WORDS, tensors
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.integrations.hf import FAMILIES
from mpnn.models import from_hf
from mpnn.position import Rotary
from mpnn.update import FeedForward, PreNorm

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")  # transformers 6 renames its method

NAMED = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "bart": "BartForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
OTHERS = {
    "mistral": "MistralForCausalLM",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "roberta": "RobertaForMaskedLM",
    "big_bird": "BigBirdForMaskedLM",
    "marian": "MarianMTModel",
    "swin": "SwinForImageClassification",
}
DATA_DECIDES = {
    "xlnet": ("XLNetLMHeadModel", "masks, segments, memory and permutations decide the graph"),
    "longformer": ("LongformerForMaskedLM", "the values of hubs decide the graph"),
    "reformer": ("ReformerForMaskedLM", "the tokens' hashes decide the graph"),
    "vit_mae": ("ViTMAEForPreTraining", "the patches that are seen decide the graph"),
}


def model(family: str, name: str) -> Any:
    torch.manual_seed(0)
    return from_hf(hf_models.made(family, getattr(transformers, name)))


def call(family: str, length: int = 9) -> dict[str, Tensor]:
    if "vit" in family or family == "swin":
        return {"pixel_values": torch.randn(BATCH, 3, 8, 8)}
    ids = {"input_ids": torch.randint(3, WORDS, (BATCH, length))}
    if family in ("bart", "marian"):
        ids["decoder_input_ids"] = torch.randint(3, WORDS, (BATCH, length - 2))
    return ids


def outcome(run: Callable[..., Any], ours: Any, given: dict[str, Tensor]) -> tuple[list[Tensor], Any]:
    """All that the model answers with, and the gradients of its parameters."""
    torch.manual_seed(1)
    found = [x for x in tensors(dict(run(**given))).values() if x.is_floating_point()]
    total = sum(x.square().sum() for x in found if x.requires_grad)
    learned = [p for p in ours.parameters() if p.requires_grad]
    return found, torch.autograd.grad(total, learned, allow_unused=True)


# ---------------------------------------------------------------------------------------------------- torch.compile


def check_compiled(family: str, name: str, backend: str, lengths: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    ours, counter = model(family, name), CompileCounterWithBackend(backend)
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for length in lengths if "input_ids" in call(family) else lengths[:1]:
        given = call(family, length)
        expected, found = (outcome(run, ours, given) for run in (ours, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2  # for the first length, and for all


@pytest.mark.parametrize("family", NAMED)
def test_converted_models_compile_whole(family: str) -> None:
    check_compiled(family, NAMED[family], "eager", (9,))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*NAMED, *OTHERS])
def test_converted_models_compile_whole_once_for_all_lengths(family: str) -> None:
    check_compiled(family, {**NAMED, **OTHERS}[family], "aot_eager", (9, 12, 15))


def test_every_family_compiles_or_says_why_not() -> None:
    assert {*NAMED, *OTHERS, *DATA_DECIDES} == set(FAMILIES)


@pytest.mark.parametrize("family", DATA_DECIDES)
def test_graphs_that_depend_on_data_are_reported(family: str) -> None:
    torch._dynamo.reset()
    name, why = DATA_DECIDES[family]
    compiled = torch.compile(model(family, name), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"cannot be traced whole: {why}. Compile the layers alone"):
        compiled(**call(family))


def test_a_mask_is_refused_in_a_whole_program() -> None:
    ours, given = model("llama", NAMED["llama"]), call("llama")
    given["attention_mask"] = hf_models.KEEP.long()
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"attention_mask decides the sizes\. Leave attention_mask out where it is 1"):
        torch.compile(ours, backend="eager", fullgraph=True)(**given)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo asks where a program breaks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_a_mask_is_obeyed_in_a_program_with_breaks() -> None:
    ours, given = model("llama", NAMED["llama"]), call("llama")
    given["attention_mask"] = hf_models.KEEP.long()
    torch._dynamo.reset()
    with torch.no_grad():  # where programs break, torch warns of gradients that it looks for
        found = torch.compile(ours, backend="eager")(**given)
    torch.testing.assert_close(found.logits, ours(**given).logits)


# ---------------------------------------------------------------------------------------------------- checkpointing


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers that are run, one entry each time."""
    run, made = MessagePassing.request, []

    def request(self: MessagePassing, *given: Any, **options: Any) -> Any:
        made.append(self)
        return run(self, *given, **options)

    monkeypatch.setattr(MessagePassing, "request", request)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_computes_layers_again_and_the_same(family: str, rounds: list[Any]) -> None:
    name = {**NAMED, **OTHERS, **{family: name for family, (name, _) in DATA_DECIDES.items()}}[family]
    ours, given = model(family, name).train(), call(family)
    plain = outcome(ours, ours, given)
    once = len(rounds)
    ours.gradient_checkpointing_enable()
    torch.testing.assert_close(outcome(ours, ours, given), plain)
    assert len(rounds) == 3 * once  # forward, and again for backward
    ours.eval()(**given)
    assert len(rounds) == 4 * once
    ours.train().gradient_checkpointing_disable()
    outcome(ours, ours, given)
    assert len(rounds) == 5 * once


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("family", "name"), [("llama", "LlamaModel"), ("bart", "BartModel"), ("vit", "ViTModel")])
def test_bare_models_take_it_too(family: str, name: str, reentrant: bool, rounds: list[Any]) -> None:
    ours, given = model(family, name).train(), call(family)
    plain, once = outcome(ours, ours, given), len(rounds)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def gradients() -> list[Tensor | None]:
        torch.manual_seed(1)
        found = [x for x in tensors(dict(ours(**given))).values() if x.is_floating_point()]
        sum(x.square().sum() for x in found if x.requires_grad).backward()
        return [p.grad for p in ours.parameters()]

    torch.testing.assert_close(gradients(), list(plain[1]))
    assert len(rounds) == 3 * once
    ours.gradient_checkpointing_disable()
    ours(**given)
    assert len(rounds) == 4 * once


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("graph", [graphs.causal() & graphs.window(3), graphs.complete()], ids=str)
def test_torchs_checkpoint_goes_around_a_layer(graph: Any, reentrant: bool) -> None:
    attention = DotProduct(16, 2, dropout=0.25, position=Rotary(8))
    layer = MessagePassing(graph, "sum", PreNorm(16, FeedForward(16), dropout=0.25), attention)
    x, gradients = torch.randn(2, 9, 16, requires_grad=True), []
    for run in (lambda: checkpoint(layer, x, use_reentrant=reentrant), lambda: layer(x)):
        torch.manual_seed(2)
        layer.zero_grad()
        x.grad = None
        run().square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_a_compiled_step_may_checkpoint() -> None:
    torch._dynamo.reset()
    ours, given = model("llama", NAMED["llama"]).train(), call("llama")
    plain = outcome(ours, ours, given)
    ours.gradient_checkpointing_enable()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outcome(compiled, ours, given), plain, rtol=1e-4, atol=1e-4)
