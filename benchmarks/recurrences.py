"""Recurrences against the torch code that transformers runs on every CPU: the functions, a whole layer, one token, and
what a node costs in a long sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.contest import BOTH, FORWARD, OURS, STEP, Bar, Case, Contest, Entry
from benchmarks.sizes import Sizes
from benchmarks.truth import Agreement
from benchmarks.whole_models import torch_products

PEER = "transformers"

# How many times faster: where torch's products leave AVX-512 unused, and elsewhere.
BARS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "scan 256": ({FORWARD: 12, BOTH: 8}, {FORWARD: 8, BOTH: 5.5}),
    "scan 64": ({BOTH: 4.5}, {BOTH: 2.8}),
    "delta": ({FORWARD: 6, BOTH: 5}, {FORWARD: 4, BOTH: 3.8}),
    "KDA": ({FORWARD: 100, BOTH: 50}, {FORWARD: 60, BOTH: 30}),
    "selective": ({FORWARD: 15, BOTH: 100}, {FORWARD: 10, BOTH: 60}),
    "layer": ({FORWARD: 1.8, STEP: 1.8}, {FORWARD: 1.5, STEP: 1.5}),
}

Inputs = dict[str, Tensor]
Work = Callable[[Inputs], Tensor]


def cases(sizes: Sizes) -> Iterator[Case]:
    small = sizes.context < 1024
    n = 128 if small else 2048
    heads = 4 if small else 24
    for chunk in (256, 64):
        name = f"Mamba-2's scan, {heads} heads of 128 x 64, N {n:,}, transformers' chunk {chunk}"
        yield Case("recurrence", name, partial(_scan, n, heads, chunk))
    heads = 2 if small else 16
    yield Case("recurrence", f"gated delta rule, {heads} heads of 128, N {n:,}", partial(_delta, n, heads))
    n = n // 4  # transformers' own code takes a minute for four times the length
    yield Case("recurrence", f"gates a feature (KDA), {heads} heads of 128, N {n:,}", partial(_kda, n, heads))
    yield Case("recurrence", f"selective scan, 1,024 channels x 16, N {n:,}", partial(_selective, n))
    n = 4 * n
    layer = "a Mamba-2 layer of 768"
    yield Case("recurrence", f"{layer}, N {n:,}, prefill", partial(_layer, n, FORWARD), (FORWARD,))
    yield Case("recurrence", f"{layer}, N {n:,}, a training step", partial(_layer, n, STEP), (STEP,))
    yield Case("recurrence", "one token, Mamba-2, 24 heads of 64 x 128", _mamba2_token, (FORWARD,))
    yield Case("recurrence", "one token, delta rule, 16 heads of 128 x 128", _delta_token, (FORWARD,))
    short, long = (256, 1024) if small else (4096, 65536)
    for direction in (FORWARD, BOTH):
        yield Case(
            "recurrence",
            f"scan, a node at {long:,} over {short:,}, {direction}",
            _nodes(short, long, direction),
            (STEP,),
        )


def _limits(work: str) -> dict[str, float]:
    return BARS[work][torch_products() != "slow, AVX-512"]


def _contest(inputs: Inputs, ours: Work, peer: Work, limits: dict[str, float]) -> Contest:
    leaves = [x for x in inputs.values() if x.requires_grad]
    entries = [Entry(name, partial(work, inputs), leaves) for name, work in ((OURS, ours), (PEER, peer))]
    bars = [
        Bar(f"at least {limit} times faster than {PEER}", limit, "at least", direction, PEER)
        for direction, limit in limits.items()
    ]
    return Contest(entries, Agreement(), "each other: results and all gradients", bars)


def _pair(theirs: Callable[..., Any], name: str, **options: Any) -> tuple[Work, Work]:
    """The first result of this library's function of that name, and of transformers'."""
    from mpnn.integrations.hf import recurrences

    own = getattr(recurrences, name)
    return (lambda x: own(**x, **options)[0]), (lambda x: theirs(**x, **options)[0])


def _learned(inputs: Inputs) -> Inputs:
    return {name: x.requires_grad_() for name, x in inputs.items()}


# ------------------------------------------------------------------------------------------------ functions


def _scan(n: int, heads: int, chunk: int) -> Contest:
    from transformers.models.mamba2 import modeling_mamba2

    inputs = {"hidden_states": torch.randn(1, n, heads, 64), "dt": torch.rand(1, n, heads), "A": -torch.rand(heads)}
    inputs |= {"B": torch.randn(1, n, 1, 128), "C": torch.randn(1, n, 1, 128)}
    options = {"chunk_size": chunk, "return_final_states": True}
    pair = _pair(modeling_mamba2.mamba2_chunk_scan, "mamba2_chunk_scan", **options)
    return _contest(_learned(inputs), *pair, _limits(f"scan {chunk}"))


def _delta(n: int, heads: int) -> Contest:
    from transformers.models.qwen3_next import modeling_qwen3_next

    pair = _pair(modeling_qwen3_next.torch_chunk_gated_delta_rule, "gated_delta_rule", use_qk_l2norm_in_kernel=True)
    return _contest(_delta_inputs(n, heads, ()), *pair, _limits("delta"))


def _kda(n: int, heads: int) -> Contest:
    from transformers.models.kimi_linear import modeling_kimi_linear

    theirs = modeling_kimi_linear.chunk_kimi_delta_attention
    pair = _pair(theirs, "gated_delta_rule", use_qk_l2norm_in_kernel=True)
    return _contest(_delta_inputs(n, heads, (128,)), *pair, _limits("KDA"))


def _delta_inputs(n: int, heads: int, gate: tuple[int, ...]) -> Inputs:
    inputs = {name: torch.randn(1, n, heads, 128) for name in ("query", "key", "value")}
    return _learned(inputs | {"g": -torch.rand(1, n, heads, *gate), "beta": torch.rand(1, n, heads)})


def _selective(n: int) -> Contest:
    """Falcon-Mamba's, 512 wide with an expansion of 2."""
    from transformers.models.falcon_mamba import modeling_falcon_mamba

    channels, states = 1024, 16
    inputs = {name: torch.randn(1, n, channels).mT for name in ("hidden_states", "dt", "z")}
    inputs |= {
        "A": -torch.rand(channels, states) - 0.5,
        "D": torch.randn(channels),
        "delta_bias": torch.randn(channels),
    }
    inputs |= {name: torch.randn(1, n, states).mT for name in ("B", "C")}
    options = {"delta_softplus": True, "return_last_state": True}
    pair = _pair(modeling_falcon_mamba.mamba_selective_scan, "mamba_selective_scan", **options)
    return _contest(_learned(inputs), *pair, _limits("selective"))


# ------------------------------------------------------------------------------------------------ a layer


def _layer(n: int, direction: str) -> Contest:
    """The mixer of Mamba-2 with its maps, as `mpnn.hf.use` leaves it."""
    from transformers import Mamba2Config, Mamba2Model

    import mpnn.hf

    config = Mamba2Config(
        hidden_size=768,
        num_heads=24,
        head_dim=64,
        state_size=128,
        n_groups=1,
        expand=2,
        num_hidden_layers=1,
        vocab_size=16,
    )
    peer = Mamba2Model(config)
    ours = copy.deepcopy(peer)
    mpnn.hf.use(ours)
    x = torch.randn(1, n, 768)

    def entry(name: str, model: Any) -> Entry:
        mixer = model.layers[0].mixer

        def step() -> Tensor:
            mixer.zero_grad()
            loss = mixer(x).square().mean()
            loss.backward()
            return loss.detach()

        forward = torch.no_grad()(lambda: mixer(x))
        return Entry(name, step if direction == STEP else forward, answer=forward)

    limit = _limits("layer")[direction]
    bars = [Bar(f"at least {limit} times faster than {PEER}", limit, "at least", direction, PEER)]
    return Contest([entry(OURS, ours), entry(PEER, peer)], Agreement(), "each other's outputs", bars)


# ------------------------------------------------------------------------------------------------ a token


def _mamba2_token() -> Contest:
    from transformers.models.mamba2 import modeling_mamba2

    from mpnn.integrations.hf import recurrences

    heads, values, keys = 24, 64, 128
    inputs = {"hidden_states": torch.randn(1, heads, values), "dt": torch.randn(1, heads, 1).expand(-1, -1, values)}
    inputs |= {"A": (-torch.rand(heads, 1, 1)).expand(-1, values, keys), "B": torch.randn(1, 1, keys)}
    inputs |= {"C": torch.randn(1, 1, keys), "D": torch.randn(heads, 1).expand(-1, values)}
    inputs |= {"dt_bias": torch.randn(heads, 1).expand(-1, values)}

    def entry(name: str, function: Callable[..., Tensor]) -> Entry:
        state = torch.zeros(1, heads, values, keys)
        return Entry(name, lambda: function(state, **inputs, dt_softplus=True))

    functions = recurrences.mamba2_selective_state_update, modeling_mamba2.mamba2_selective_state_update
    entries = [entry(name, function) for name, function in zip((OURS, PEER), functions, strict=True)]
    bars = [Bar(f"at least 5 times faster than {PEER}", 5.0, "at least", FORWARD, PEER)]
    return Contest(entries, Agreement(), "each other's first token", bars)


def _delta_token() -> Contest:
    from transformers.models.qwen3_next import modeling_qwen3_next

    theirs = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    inputs = {name: x.detach() for name, x in _delta_inputs(1, 16, ()).items()}
    inputs["initial_state"] = torch.randn(1, 16, 128, 128)
    return _contest(inputs, *_pair(theirs, "gated_delta_rule", **options), {FORWARD: 3})


# ------------------------------------------------------------------------------------------------ a long sequence


def _nodes(short: int, long: int, direction: str) -> Callable[[], Contest]:
    """The time of one node: the short sequence runs as often as the long one has room for it."""

    def scan(n: int) -> Callable[[], Tensor]:
        from mpnn.kernels.recurrent.scan import recurrence

        q, k = torch.randn(2, 1, n, 1, 128)
        v, gate = torch.randn(1, n, 24, 64), F.logsigmoid(torch.randn(1, n, 24))
        leaves = [x.requires_grad_(direction == BOTH) for x in (q, k, v, gate)]

        def once() -> Tensor:
            out, _ = recurrence(*leaves)
            if direction == BOTH:
                torch.autograd.grad(out.sum(), leaves)
            return out.detach()

        return once

    def make() -> Contest:
        one, many = scan(long), scan(short)

        def repeat() -> Tensor:
            return [many() for _ in range(long // short)][-1]

        peer = f"{long // short} x {short:,} nodes"
        bars = [Bar("at most 1.15 of the time a node", 1.15, "at most", STEP, peer)]
        return Contest([Entry(OURS, one, checked=False), Entry(peer, repeat, checked=False)], bars=bars)

    return make
