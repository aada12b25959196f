"""RetNet, Mamba-2 and Gated DeltaNet: against transformers and the papers' formulas, packed documents, decoding."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import MessagePassing, attention, graphs
from mpnn.decoding.cache import KVCache
from mpnn.models import DeltaNet, DeltaNetConfig, Mamba2, Mamba2Config, RetNet, RetNetConfig, load_weights

SYSTEM = "RetNet, Mamba-2, Gated DeltaNet"
SIZES = {"vocabulary": 31, "dim": 32, "layers": 2, "context": 200}
MODELS = {
    "RetNet": lambda: RetNet(RetNetConfig(**SIZES, heads=2, hidden=48)),
    "Mamba2": lambda: Mamba2(Mamba2Config(**SIZES, head_dim=8, state=12, groups=2)),
    "DeltaNet": lambda: DeltaNet(DeltaNetConfig(**SIZES, heads=4, key_heads=2, head_dim=8, value_dim=6, hidden=48)),
    "DeltaNet, no gate": lambda: DeltaNet(DeltaNetConfig(**SIZES, heads=2, head_dim=8, value_dim=6, gated=False)),
}
SPECS = {
    "Retention": lambda: attention.Retention(16, 4),
    "GatedLinear": lambda: attention.GatedLinear(16, 2),
    "StateSpace": lambda: attention.StateSpace(16, 4, state=6, groups=2),
    "DeltaRule": lambda: attention.DeltaRule(16, 4, key_heads=2),
    "DeltaRule, no gate": lambda: attention.DeltaRule(16, 2, gated=False),
}


def tokens(length: int = 67) -> Tensor:
    return torch.randint(31, (2, length))


def error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest difference, and its bound: roundings of float32 in two layers, relative to the largest number."""
    return float((found - expected).abs().max().detach()), 1e-5 * float(expected.abs().max().detach())


def worst(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


# ------------------------------------------------------------------------------------------------ specs


@pytest.mark.parametrize("name", SPECS)
def test_specs_are_rounds_over_causal_graphs(name: str) -> None:
    op = MessagePassing(graphs.causal(), "sum", None, SPECS[name]()).double()
    x = torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True)
    packed = (graphs.causal() & graphs.documents([15, 25])).bind(40)
    results = []
    for backend in ("edge_list", "auto"):
        op.backend = backend
        y = op(x, packed)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *op.parameters()])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(op(x[:, 15:]), y[:, 15:])
    with pytest.raises(ValueError, match=r"need causal\(\)"):
        op(x, graphs.complete())
    with pytest.raises(ValueError, match="do not divide"):
        type(op.attention)(16, 3)
    _, weights = op(x, packed, return_weights=True)
    assert weights.shape == (2, packed.num_edges, op.attention.heads)


def test_retention_is_the_papers_formula() -> None:
    op = MessagePassing(graphs.causal(), "sum", None, attention.Retention(16, 4)).double()
    x, offset = torch.randn(30, 16, dtype=torch.float64), torch.arange(30)[:, None] - torch.arange(30)
    query, key, value = op.attention.to_parts(x).unflatten(-1, (12, 4)).transpose(0, 1).split(4)
    gamma = 1 - 2.0 ** (-5 - torch.arange(4.0, dtype=torch.float64))
    decay = (gamma[:, None, None] ** offset.clamp(min=0)).tril()
    heads = (query @ key.mT / 2 * decay) @ value
    torch.testing.assert_close(op(x), op.attention.to_out(heads.transpose(0, 1).flatten(1)))


@pytest.mark.usefixtures("seed")
def test_retnet_is_the_papers_formula(measured: Callable[..., None]) -> None:
    """Sun et al. 2023, eq. 5 to 9, all pairs at once, in float64."""
    model, ids = MODELS["RetNet"](), tokens(40)
    exact = copy.deepcopy(model).double()
    offset = (torch.arange(40)[:, None] - torch.arange(40)).double()
    gamma = 1 - 2.0 ** (-5 - torch.arange(2.0, dtype=torch.float64))[:, None, None]
    decay = (gamma ** offset.clamp(min=0)).tril()
    frequency = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turns = torch.polar(torch.ones(40, 8, dtype=torch.float64), torch.arange(40)[:, None] * frequency)
    x = exact.token(ids)
    for block in exact.layers:
        z, query, key, value = block.layer.to_parts(block.layer.norm(x)).split([64, 32, 32, 64], -1)
        query, key, value = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (query, key, value))
        query, key = (torch.complex(*y.chunk(2, -1)) * turns for y in (query, key))
        heads = ((query @ key.mH).real / 4 * decay @ value).transpose(1, 2)
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        x = x + block.layer.to_out(heads.flatten(2) * F.silu(z))
        x = x + block.ffn(block.norm(x))
    measured(SYSTEM, "formula (RetNet)", *error(model(ids), exact.norm(x) @ exact.token.weight.T))


def test_short_convolution_is_a_convolution() -> None:
    op = MessagePassing(graphs.causal() & graphs.window(3), "sum", None, attention.ShortConvolution(6, 4)).double()
    x = torch.randn(2, 20, 6, dtype=torch.float64, requires_grad=True)
    weight = op.attention.weight.T[:, None]
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight, op.attention.bias, groups=6).mT
    parameters = [x, *op.parameters()]
    grads = torch.autograd.grad(expected.square().sum(), parameters)
    for backend in ("scan", "edge_list", "csr"):
        op.backend = backend
        torch.testing.assert_close(op(x), expected)
        torch.testing.assert_close(torch.autograd.grad(op(x).square().sum(), parameters), grads)
    packed = (graphs.causal() & graphs.window(3) & graphs.documents([2, 0, 1, 17])).bind(20)
    results = []
    for backend in ("scan", "edge_list"):
        op.backend = backend
        results.append([op(x, packed), *torch.autograd.grad(op(x, packed).square().sum(), parameters)])
    torch.testing.assert_close(*results)
    op.backend = "scan"
    with pytest.raises(ValueError, match="it computes short convolutions"):
        op(x, graphs.causal())


# ------------------------------------------------------------------------------------------------ transformers


@pytest.fixture
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.usefixtures("seed")
def test_mamba2_is_that_of_transformers(groups: int, measured: Callable[..., None]) -> None:
    hf = pytest.importorskip("transformers")
    if groups > 1 and tuple(map(int, hf.__version__.split(".")[:2])) <= (5, 20):
        pytest.skip("Mamba-2 of transformers 5.20 with groups computes other numbers")
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": groups, "chunk_size": 16}
    config = hf.Mamba2Config(vocab_size=31, num_hidden_layers=2, **sizes, tie_word_embeddings=False)
    theirs = hf.Mamba2ForCausalLM(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    options = {"head_dim": 8, "state": 12, "groups": groups, "tied": False}
    ours = load_weights(Mamba2(Mamba2Config(**SIZES, **options)), theirs.state_dict())
    ids = tokens()
    mine, expected = ours(ids), theirs(ids).logits
    assert worst(mine, expected) < 1e-5
    measured(SYSTEM, "Hugging Face Mamba-2", *error(mine, expected))
    direction = torch.randn_like(expected)
    (mine * direction).sum().backward()
    (expected * direction).sum().backward()
    theirs_by_name = load_weights(copy.deepcopy(ours), {n: p.grad for n, p in theirs.named_parameters()}).state_dict()
    for name, parameter in ours.named_parameters():
        assert worst(parameter.grad, theirs_by_name[name]) < 1e-5, name
    theirs.generation_config.eos_token_id = None
    with torch.no_grad():
        prompt = {"input_ids": ids[:, :20], "attention_mask": torch.ones(2, 20, dtype=torch.int64)}
        generated = theirs.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert ours.generate(ids[:, :20], 8, temperature=0).equal(generated)


@pytest.mark.usefixtures("seed")
def test_a_layer_is_that_of_qwen3_next(measured: Callable[..., None]) -> None:
    hf = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_num_key_heads": 2}
    config = hf.Qwen3NextConfig(hidden_size=32, num_hidden_layers=2, linear_num_value_heads=4, **widths)
    theirs = hf.Qwen3NextGatedDeltaNet(config, 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = DeltaNetConfig(dim=32, heads=4, key_heads=2, head_dim=8, value_dim=6).layer()
    ours.norm = torch.nn.Identity()
    with torch.no_grad():  # theirs groups the maps by heads of keys
        query, key, value, z = theirs.in_proj_qkvz.weight.unflatten(0, (2, -1)).split([8, 8, 12, 12], 1)
        beta, step = theirs.in_proj_ba.weight.unflatten(0, (2, -1)).split([2, 2], 1)
        ours.to_parts.weight.copy_(torch.cat([w.flatten(0, 1) for w in (z, query, key, value, beta, step)]))
        ours.convolution.attention.weight.copy_(theirs.conv1d.weight.squeeze(1).T)
        ours.recurrence.attention.log_decay.copy_(theirs.A_log)
        ours.recurrence.attention.step_bias.copy_(theirs.dt_bias)
        ours.gated.weight.copy_(theirs.norm.weight)
        ours.to_out.weight.copy_(theirs.out_proj.weight)
    x = torch.randn(2, 67, 32, requires_grad=True)
    mine, expected = ours(x) - x, theirs(x)
    assert worst(mine, expected) < 1e-5
    measured(SYSTEM, "Hugging Face Qwen3-Next, a layer", *error(mine, expected))
    direction = torch.randn_like(expected)
    assert worst(*(torch.autograd.grad((y * direction).sum(), x)[0] for y in (mine, expected))) < 1e-5


# ------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("name", MODELS)
def test_decoding_with_the_state_is_the_full_pass(name: str) -> None:
    model, ids = MODELS[name]().double().eval(), tokens(40)
    with torch.no_grad():
        whole, cache = model(ids), KVCache(60)
        pieces = [model(ids[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 9), (9, 38))]
        other = copy.deepcopy(cache)
        for rest in (cache, other):
            torch.testing.assert_close(torch.cat([*pieces, model(ids[:, 38:], cache=rest)], 1), whole)
        cache.select(torch.tensor([1, 1]))
        assert cache.count == 40
    with pytest.raises(ValueError, match="cannot forget"):
        cache.crop(3)
    with pytest.raises(ValueError, match="does not store gradients"):
        model(ids, cache=KVCache(60))
    with pytest.raises(ValueError, match="length of 60 nodes"), torch.no_grad():
        model(ids, cache=other)
    assert model.generate(ids[:, :3], 4, temperature=0).shape == (2, 7)


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_alone(name: str) -> None:
    model, ids = MODELS[name]().double(), tokens(40)
    packed = model(ids, lengths=[1, 14, 25])
    for first, last in ((0, 1), (1, 15), (15, 40)):
        torch.testing.assert_close(packed[:, first:last], model(ids[:, first:last]))
    assert torch.isfinite(model.loss(ids, ids, lengths=[15, 25]))


@pytest.mark.parametrize("name", MODELS)
def test_a_later_token_changes_nothing_before(name: str) -> None:
    model, ids = MODELS[name](), tokens(30)
    other = ids.clone()
    other[:, 20] += 1
    before, after = model(ids), model(other % 31)
    assert before[:, :20].equal(after[:, :20])
    assert not before[:, 20].equal(after[:, 20])
    with pytest.raises(ValueError, match=r"need causal\(\)|attends to"):
        model(ids, graph=graphs.causal() & graphs.window(3))
