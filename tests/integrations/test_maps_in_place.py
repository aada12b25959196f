"""Linear maps of models of transformers and PyTorch Geometric by the quicker product, in place: the same objects, and
everything that other libraries do with them still works."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from onednn_maps import Products, products
from torch import nn
from torch.nn.utils import parametrizations, prune

import mpnn.hf
from mpnn.backends import cost_model
from mpnn.integrations import callers, maps as in_place
from mpnn.update import maps

__all__ = ["products"]
hf = pytest.importorskip("transformers")
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 7, bias=False))


X = torch.linspace(-1, 1, 40 * 20).sin().view(2, 20, 20)


@pytest.fixture
def pair(products: Products) -> Iterator[tuple[nn.Sequential, nn.Sequential]]:
    """A network, and one with the same weights whose maps run by oneDNN. It did so in the end."""
    plain, ours = network(), network()
    assert len(in_place.use(ours)) == 2
    yield plain, ours
    products.clear()
    with torch.no_grad():
        torch.testing.assert_close(ours(X), plain(X), **CLOSE)
    assert products == [(40, 30), (40, 7)]


def test_a_map_stays_the_same_object(pair: tuple[nn.Module, nn.Module]) -> None:
    plain, ours = pair
    assert type(ours[0]) is nn.Linear
    assert repr(ours) == repr(plain)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in plain.named_modules()]


def test_gradients(pair: tuple[nn.Module, nn.Module]) -> None:
    for module in pair:
        module(X).square().mean().backward()
    for a, b in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, **CLOSE)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_with_their_own_weights(
    duplicate: Callable[[Any], Any], pair: tuple[nn.Module, nn.Module], products: Products
) -> None:
    plain, ours = pair
    other = duplicate(ours)
    with torch.no_grad():
        for module in (plain[0], other[0]):
            module.weight.mul_(2)
        torch.testing.assert_close(other(X), plain(X), **CLOSE)
        plain[0].weight.div_(2)
    assert products == [(40, 30), (40, 7)]
    assert other[0].forward.module is other[0]


def test_whole_models_are_saved_and_loaded(pair: tuple[nn.Module, nn.Module]) -> None:
    file = io.BytesIO()
    torch.save(pair[1], file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(X), pair[0](X), **CLOSE)


def test_hooks_run(pair: tuple[nn.Module, nn.Module]) -> None:
    plain, ours = pair
    handles = []
    for module in pair:
        handles.append(module[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)))
        handles.append(module[0].register_forward_hook(lambda module, inputs, out: 2 * out))
        handles.append(module[0].register_full_backward_hook(lambda module, gradients, outs: (3 * gradients[0],)))
    x, y = (X.clone().requires_grad_() for _ in pair)
    torch.testing.assert_close(ours(y), plain(x), **CLOSE)
    plain(x).sum().backward()
    ours(y).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, **CLOSE)
    for handle in handles:
        handle.remove()


@pytest.mark.filterwarnings("ignore")
def test_programs_are_torchs(pair: tuple[nn.Module, nn.Module], products: Products) -> None:
    plain, ours = pair
    products.clear()
    with torch.no_grad():
        for strict in (True, False):
            program = torch.export.export(ours, (X,), strict=strict)
            assert sum(node.target is torch.ops.aten.linear.default for node in program.graph.nodes) == 2
        torch.testing.assert_close(torch.compile(ours, fullgraph=True, backend="eager")(X), plain(X))
        torch.testing.assert_close(torch.jit.trace(ours, (X,), check_trace=False)(X), plain(X))
        assert [node.op for node in torch.fx.symbolic_trace(ours).graph.nodes].count("call_module") == 3
    assert products == []


@pytest.mark.filterwarnings("ignore")
def test_quantization_finds_its_maps(pair: tuple[nn.Module, nn.Module], products: Products) -> None:
    products.clear()
    try:
        plain, ours = (torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, torch.qint8) for m in pair)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert torch.equal(ours(X), plain(X))
    assert products == []


@pytest.mark.parametrize("name", ["pruned", "weight_norm", "spectral_norm", "parametrized"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.usefixtures("products")
def test_computed_weights(name: str, before: bool) -> None:
    """A computed weight is left alone, and correct if it comes later."""

    def change(module: Any) -> None:
        torch.manual_seed(1)
        if name == "pruned":
            prune.random_unstructured(module[0], "weight", 0.5)
        elif name == "weight_norm":
            parametrizations.weight_norm(module[0])
        elif name == "spectral_norm":
            parametrizations.spectral_norm(module[0])
        else:
            nn.utils.parametrize.register_parametrization(module[0], "weight", nn.Tanh())

    plain, ours = network(), network()
    if before:
        change(ours)
    assert len(in_place.use(ours)) == (1 if before else 2)
    if not before:
        change(ours)
    change(plain)
    for _ in range(2):
        plain.eval(), ours.eval()
        torch.testing.assert_close(ours(X), plain(X), **CLOSE)
        with torch.no_grad():
            torch.testing.assert_close(ours(X), plain(X), **CLOSE)
            for module in (plain, ours):
                for parameter in module[0].parameters():
                    parameter.data.add_(0.1)


class Own(nn.Linear):
    pass


def test_subclasses_and_other_dtypes_are_left(products: Products) -> None:
    assert (
        in_place.use(nn.Sequential(Own(20, 30), nn.Linear(30, 7).double(), nn.LayerNorm(7), nn.Bilinear(2, 2, 2))) == []
    )
    assert in_place.use(nn.MultiheadAttention(8, 2)) == []  # it reads its weights itself


def test_nothing_changes_where_torch_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "map_prices", lambda threads: None)
    maps.forget()
    model = network()
    assert in_place.use(model) == []
    assert "forward" not in vars(model[0])


def test_a_forward_that_another_library_wrapped_is_left(pair: tuple[nn.Module, nn.Module]) -> None:
    accelerate = pytest.importorskip("accelerate.hooks")
    plain, ours = pair
    accelerate.add_hook_to_module(ours[0], accelerate.ModelHook())
    undo = in_place.use(ours)
    assert undo == []
    torch.testing.assert_close(ours(X), plain(X), **CLOSE)
    callers._put_back(ours[0], "forward", in_place.Forward(ours[0]), {})  # as restoring an earlier use does
    torch.testing.assert_close(ours(X), plain(X), **CLOSE)
    accelerate.remove_hook_from_module(ours[0])
    assert isinstance(ours[0].forward, in_place.Forward)


def test_functional_calls_and_swaps_of_weights(pair: tuple[nn.Module, nn.Module]) -> None:
    plain, ours = pair
    other = {name: value * 2 for name, value in plain.named_parameters()}
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            got, expected = (torch.func.functional_call(m, other, (X,)) for m in (ours, plain))
            torch.testing.assert_close(got, expected, **CLOSE)
    average = torch.optim.swa_utils.AveragedModel(ours)
    average.update_parameters(nn.Sequential(*(copy.deepcopy(part) for part in ours)))
    torch.testing.assert_close(average(X), plain(X), **CLOSE)


# ------------------------------------------------------------------------------------------------ transformers


def gpt2() -> Any:
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return hf.GPT2LMHeadModel(config).eval()


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=60, **sizes)).eval()


IDS = torch.arange(120).view(2, 60) % 59 + 1


@pytest.mark.parametrize(("build", "count"), [(gpt2, 2 * 4 + 1), (bert, 2 * 6 + 2)])
def test_use_takes_the_maps_and_gives_them_back(build: Callable[[], Any], count: int, products: Products) -> None:
    model = build()
    with torch.no_grad():
        expected = model(IDS).logits
        handle = mpnn.hf.use(model)
        assert handle.maps == count
        assert f"{count} linear maps by the faster of torch and oneDNN" in repr(handle)
        torch.testing.assert_close(model(IDS).logits, expected, **CLOSE)
        assert len(products) >= count - 2  # a pooler and a classifier have two rows
        again = mpnn.hf.use(model)
        assert again.maps == count
        without = mpnn.hf.use(model, maps=False)
        assert without.maps == 0
        assert "linear maps" not in repr(without)
        without.restore()
        assert handle.maps == count
        handle.restore()
        assert handle.maps == 0
        assert not any("forward" in vars(module) for module in model.modules())
        products.clear()
        torch.testing.assert_close(model(IDS).logits, expected, **CLOSE)
        assert products == []
        assert mpnn.hf.use(model, maps=False).maps == 0
        model(IDS)
        assert products == []


@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer transformers call it activation checkpointing
def test_training_steps_agree(products: Products) -> None:
    plain, ours = gpt2(), gpt2()
    assert ours.lm_head.weight is ours.transformer.wte.weight
    mpnn.hf.use(ours)
    ours.gradient_checkpointing_enable()
    losses = []
    for model in (plain, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(3):
            loss = model(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(model(IDS, labels=IDS).loss)
    torch.testing.assert_close(torch.stack(losses[3:]), torch.stack(losses[:3]), rtol=1e-4, atol=0.0)
    assert len(products) > 3 * 2 * 9


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lora(products: Products) -> None:
    peft = pytest.importorskip("peft")
    plain, ours = bert(), bert()
    mpnn.hf.use(ours)
    config = peft.LoraConfig(target_modules=["query", "value"], r=4, init_lora_weights=False)
    outs = []
    for model in (plain, ours):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            outs.append([adapted(IDS).logits])
            with adapted.disable_adapter():
                outs[-1].append(adapted(IDS).logits)
            adapted.merge_adapter()  # through .data
            outs[-1].append(adapted(IDS).logits)
            adapted.unmerge_adapter()
            outs[-1].append(adapted(IDS).logits)
            outs[-1].append(adapted.merge_and_unload()(IDS).logits)
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(b, a, **CLOSE)
    assert products


def test_autocast_and_half_are_torchs(products: Products) -> None:
    plain, ours = bert(), bert()
    mpnn.hf.use(ours)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours(IDS)
    ours.bfloat16()
    ours(IDS)
    assert products == []
    assert ours.float().state_dict().keys() == plain.state_dict().keys()


def test_generation_is_the_same(products: Products) -> None:
    plain, ours = gpt2(), gpt2()
    mpnn.hf.use(ours)
    expected = plain.generate(IDS[:1, :20], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(IDS[:1, :20], max_new_tokens=5, do_sample=False, pad_token_id=0), expected)
    assert all(rows >= 16 for rows, _ in products)  # a token at a time is torch's


# ------------------------------------------------------------------------------------------------ PyTorch Geometric


def test_pyg_takes_its_linear_maps(products: Products) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    import mpnn.pyg

    torch.manual_seed(0)
    plain = pyg.Sequential(
        "x, edges",
        [(pyg.GATConv(12, 8, heads=2), "x, edges -> x"), (pyg.SAGEConv(-1, 8), "x, edges -> x"), nn.Linear(8, 3)],
    )
    x, edges = torch.randn(50, 12), torch.randint(0, 50, (2, 200))
    ours = copy.deepcopy(plain)
    report = mpnn.pyg.use(ours)
    assert report.maps == 4  # SAGE's are made by the first call
    assert "4 linear maps by the faster of torch and oneDNN" in str(report)
    out = ours(x, edges)
    plain(x, edges)
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(out, plain(x, edges), **CLOSE)
    assert {(50, 16), (50, 8), (50, 3)} <= set(products)
    report.restore()
    assert report.maps == 0
    products.clear()
    torch.testing.assert_close(ours(x, edges), out, **CLOSE)
    assert products == []
    assert mpnn.pyg.use(ours, maps=False).maps == 0


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
@pytest.mark.usefixtures("one_process")
def test_training_over_processes(kind: str, products: Products) -> None:
    plain, ours = network(), network()
    assert len(in_place.use(ours)) == 2
    if kind == "DDP":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(ours)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for part in (ours[0], ours[2], ours):
            fully_shard(part, mesh=mesh)
        wrapped = ours
    for module, parameters in ((plain, plain.parameters()), (wrapped, wrapped.parameters())):
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for _ in range(3):
            module(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(X), plain(X), **CLOSE)
    assert len(products) >= 3 * 5
