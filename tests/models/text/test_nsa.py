"""NSA: against the paper's formulas, written with masks and loops."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from mpnn import graphs
from mpnn.decoding.cache import KVCache
from mpnn.models import NSA, NSAConfig

SIZES = {"vocabulary": 30, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden": 24}


def model(**options: float) -> NSA:
    torch.manual_seed(0)
    blocks = {"size": 4, "stride": 2, "block": 4, "top": 4, "window": 5, "context": 64}
    made = NSA(NSAConfig(**{**SIZES, **blocks, **options})).double()
    for parameter in made.parameters():  # far from zero, so that choices have no ties
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def weights(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[H, N, M] of queries [N, H, D] and keys [M, H, D]; a row without edges is 0."""
    logits = torch.einsum("ihd,jhd->hij", query, key) * query.shape[-1] ** -0.5
    return logits.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)


def rotated(x: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None] * base ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def formula(net: NSA, ids: Tensor) -> Tensor:
    """Logits of one sentence [N]."""
    c, x = net.layers[0].config, net.token(ids)
    n, shared = len(ids), c.heads // c.kv_heads
    for layer in net.layers:
        update = layer.update
        h = update.norm(x)
        query = layer.to_query(h).view(n, c.heads, -1)
        keys, values = (m(h).view(n, 3, c.kv_heads, -1).unbind(1) for m in (layer.to_key, layer.to_value))
        starts = range(0, n - c.size + 1, c.stride)

        def summary(module: torch.nn.Module, y: Tensor, starts: range = starts) -> Tensor:
            rows = [
                torch.stack(
                    [module.mlp((y[s : s + c.size, g] + module.position[g]).flatten()) for g in range(c.kv_heads)]
                )
                for s in starts
            ]
            return torch.stack(rows) if rows else y[:0]

        k, v = (
            summary(*pair).repeat_interleave(shared, 1)
            for pair in ((layer.key_summaries, keys[0]), (layer.value_summaries, values[0]))
        )
        ended = torch.tensor([[s + c.size - 1 <= i for s in starts] for i in range(n)], dtype=torch.bool)
        p = weights(query, k, ended)
        out = [torch.einsum("hij,jhd->ihd", p, v)]
        # equations 9 and 10: sums over the summaries that share nodes with a block, and over the heads of a group
        count = -(-n // c.block)
        important = torch.zeros(c.heads, n, count, dtype=torch.float64)
        for j, m, back in product(range(count), range(c.block // c.stride), range(c.size // c.stride)):
            if 0 <= (at := j * c.block // c.stride + m - back) < len(k):
                important[:, :, j] += p[:, :, at].detach()
        important = important.view(c.kv_heads, shared, n, count).sum(1)
        chosen = torch.zeros(c.kv_heads, n, n, dtype=torch.bool)
        for g, i in product(range(c.kv_heads), range(n)):
            fixed = {0, i // c.block, max(i // c.block - 1, 0)}
            others = sorted(set(range(i // c.block + 1)) - fixed, key=lambda j: -float(important[g, i, j]))
            for j in [*fixed, *others[: max(c.top - len(fixed), 0)]]:
                chosen[g, i, j * c.block : min((j + 1) * c.block, i + 1)] = True
        i, j = torch.arange(n)[:, None], torch.arange(n)
        turned = rotated(query, c.base)
        for branch, mask in ((1, chosen.repeat_interleave(shared, 0)), (2, (j <= i) & (i - j < c.window))):
            k, v = rotated(keys[branch], c.base), values[branch]
            p = weights(turned, k.repeat_interleave(shared, 1), mask)
            out.append(torch.einsum("hij,jhd->ihd", p, v.repeat_interleave(shared, 1)))
        gates = layer.to_gate(h).sigmoid().view(n, 3, c.heads).unbind(1)
        m = sum(gate[..., None] * o for gate, o in zip(gates, out, strict=True))
        x = x + layer.to_out(m.flatten(1))
        h = update.ffn_norm(x)
        x = x + update.ffn(h)
    return net.head(net.norm(x))


OPTIONS = [{}, {"size": 2}, {"block": 6, "size": 6}, {"top": 3, "stride": 4, "bias": 1}, {"window": 1, "kv_heads": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("length", [3, 23])
@pytest.mark.covering
def test_follows_the_formulas(options: dict[str, int], length: int, measured: Callable[..., None]) -> None:
    net, ids = model(**options), torch.randint(30, (2, length))
    expected = torch.stack([formula(net, row) for row in ids])
    found = net(ids)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    direction, parameters = torch.randn_like(found), list(net.parameters())
    ours, theirs = (
        torch.autograd.grad((x * direction).sum(), parameters, materialize_grads=True) for x in (found, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    measured("MoBA, DSA, NSA", "formula (NSA)", float((found - expected).detach().abs().max()), 1e-10)


def test_choices_do_not_depend_on_how_many_rows_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, ids = model(), torch.randint(30, (2, 23))
    whole = net(ids)
    monkeypatch.setattr("mpnn.attention.topk._AT_ONCE", 1)
    torch.testing.assert_close(net(ids), whole)


def test_weights_are_dropped_in_training() -> None:
    net, ids = model(attention_dropout=0.5), torch.randint(30, (1, 20))
    torch.testing.assert_close(net.eval()(ids), model()(ids))
    assert not torch.allclose(net.train()(ids), net.eval()(ids))


def test_sizes_must_divide() -> None:
    with pytest.raises(ValueError, match="stride must divide size and block"):
        model(stride=3)
    for wrong, least in (
        ({"top": 2}, "top must be at least 3"),
        ({"block": 0}, "block must"),
        ({"size": 0}, "size must"),
    ):
        with pytest.raises(ValueError, match=least):
            model(**wrong)


def test_graphs_are_refused() -> None:
    net, ids = model(), torch.zeros(1, 8, dtype=torch.int64)
    for options in ({"graph": graphs.identity()}, {"lengths": [3, 5]}):
        with pytest.raises(ValueError, match="without graph and lengths"):
            net(ids, **options)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[23], [1] * 23, [2, 9, 1, 1, 10], [7, 16]])
def test_a_cache_gives_the_logits_of_the_whole_text(pieces: list[int]) -> None:
    net, ids, cache = model(), torch.randint(30, (2, 23)), KVCache(23)
    found = torch.cat([net(piece, cache=cache) for piece in ids.split(pieces, 1)], 1)
    torch.testing.assert_close(found, net(ids), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="a length of 23 nodes; with the new ones there would be 24"):
        net(ids[:, :1], cache=cache)


@torch.no_grad()
def test_a_cache_is_copied_selected_and_cropped_to_nothing_alone() -> None:
    net, ids, cache = model(), torch.randint(30, (3, 20)), KVCache(20)
    net(ids[:, :13], cache=cache)
    other = copy.deepcopy(cache)
    other.select(torch.tensor([2, 0]))
    torch.testing.assert_close(net(ids[[2, 0], 13:], cache=other), net(ids)[[2, 0], 13:], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(net(ids[:, 13:], cache=cache), net(ids)[:, 13:], rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="cannot forget nodes"):
        cache.crop(12)
    cache.crop(0)
    torch.testing.assert_close(net(ids, cache=cache), net(ids), rtol=1e-10, atol=1e-10)


def test_generated_tokens_are_the_likeliest_of_the_whole_text() -> None:
    net, ids = model(), torch.randint(30, (2, 6))
    found = net.generate(ids, 14, temperature=0)
    for n in range(6, 20):
        assert torch.equal(found[:, n], net(found[:, :n])[:, -1].argmax(-1))
    with pytest.raises(ValueError, match="does not store gradients"):
        net(ids, cache=KVCache(6))
