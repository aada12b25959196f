"""Models kept in a folder come back as they were, and no damaged or foreign file is taken for one."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mpnn import graphs
from mpnn.models import GAT, GPT, Model
from mpnn.models.saving import CONFIG, WEIGHTS

TOKENS = torch.arange(10)[None]


def gpt(**options):
    return GPT(17, 16, 2, 2, graphs.causal() & graphs.window(3), context=12, **options).eval()


def test_a_model_comes_back_as_it_was(tmp_path):
    model = gpt(dropout=0.1)
    model.save_pretrained(tmp_path / "new" / "folder")
    again = GPT.from_pretrained(tmp_path / "new" / "folder")
    assert not again.training
    assert again.layers[0].graph == graphs.causal() & graphs.window(3)
    assert torch.equal(again(TOKENS), model(TOKENS))


def test_the_graph_can_be_another_one(tmp_path):
    gpt().save_pretrained(tmp_path)
    wide = GPT.from_pretrained(tmp_path, graph=graphs.causal())
    assert wide.layers[1].graph == graphs.causal()


def test_a_graph_of_data_is_given_again(tmp_path):
    cycle = graphs.from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
    model = GAT(4, 2, graph=cycle).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"with a graph, Graph\(3 nodes, 3 edges\); pass it: from_pretrained\(..., graph="
    ):
        GAT.from_pretrained(tmp_path)
    x = torch.randn(3, 4)
    assert torch.equal(GAT.from_pretrained(tmp_path, graph=cycle)(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_keep_their_type(tmp_path, dtype):
    model = gpt().to(dtype)
    model.save_pretrained(tmp_path)
    again = GPT.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    assert torch.equal(again(TOKENS), model(TOKENS))


@dataclass(frozen=True)
class Sizes:
    width: int = 2


class Mine(Model):
    """A stranger's model, whose configuration may be left out."""

    def __init__(self, config: Sizes | None = None, **more: int) -> None:
        super().__init__()
        self.linear = nn.Linear((Sizes() if config is None else config).width, more.get("out", 1))


@pytest.mark.parametrize("arguments", [{}, {"config": Sizes(3)}, {"config": Sizes(3), "out": 4}])
def test_a_model_of_ones_own_comes_back(tmp_path, arguments):
    Mine(**arguments).save_pretrained(tmp_path)
    assert Mine.from_pretrained(tmp_path).linear.weight.shape == Mine(**arguments).linear.weight.shape


@pytest.fixture
def folder(tmp_path):
    gpt().save_pretrained(tmp_path)
    return tmp_path


def test_weights_of_another_model_are_refused(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    GPT(17, 8, 2, 2, context=12).save_pretrained(other)
    (folder / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())
    with pytest.raises(ValueError, match="does not hold the weights of this GPT"):
        GPT.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"model": "GPT", "argum', "is damaged"),
        ('{"hidden_size": 768}', "was not written by save_pretrained"),
        ('{"model": "Bert", "arguments": {}}', "describes a Bert, not a GPT"),
        ('{"model": "GPT", "arguments": {"width": 8}}', "does not describe a GPT, which has no argument width"),
    ],
)
def test_a_foreign_configuration_is_refused(folder, text, sentence):
    (folder / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        GPT.from_pretrained(folder)


def test_what_cannot_be_written_leaves_no_file(tmp_path):
    class Odd(GPT):
        def __init__(self, activation) -> None:
            super().__init__(17, 16, 2, 2)

    with pytest.raises(ValueError, match="activation="):
        Odd(torch.tanh).save_pretrained(tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_the_configuration_reads_as_the_call(folder):
    assert json.loads((folder / CONFIG).read_text()) == {
        "model": "GPT",
        "arguments": {
            "vocabulary": 17,
            "dim": 16,
            "heads": 2,
            "layers": 2,
            "graph": {"topology": "causal() & window(3)"},
            "context": 12,
        },
    }


class Tied(Model):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.second.weight = self.third.weight = self.first.weight


def test_a_model_saved_twice_gives_the_same_bytes(tmp_path):
    """safetensors writes metadata in random order, to which the names of tied weights belong."""
    model = Tied()
    for name in range(8):
        model.save_pretrained(tmp_path / str(name))
    for name in (CONFIG, WEIGHTS):
        assert len({(tmp_path / str(k) / name).read_bytes() for k in range(8)}) == 1


def test_a_changed_byte_of_the_weights_is_noticed(tmp_path):
    gpt().save_pretrained(tmp_path)
    saved = (tmp_path / WEIGHTS).read_bytes()
    for at in (len(saved) - 1, len(saved) // 2):
        (tmp_path / WEIGHTS).write_bytes(saved[:at] + bytes([saved[at] ^ 1]) + saved[at + 1 :])
        with pytest.raises(ValueError, match="a byte of the file has changed since it was saved"):
            GPT.from_pretrained(tmp_path)
