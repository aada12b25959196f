"""Recurrences in C++ against their twins, one node after the other: values and all gradients, states in and out,
documents, shared heads, gates from 0 to 1."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from row_cases import INTERPRETED, TRITON, on_triton, poisoned
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from mpnn.kernels.cpu import library
from mpnn.kernels.recurrent import reference, scan, selective as module
from mpnn.kernels.recurrent.scan import ends_of, in_chunks, recurrence
from mpnn.kernels.recurrent.selective import selective_scan
from mpnn.kernels.recurrent.state import state_update
from tests.support import recurrences as twin

__all__ = ["poisoned"]  # memory that Triton's kernels write
pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")

NODES, WIDTH, DEEP = 131, 20, 12
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "near 1": lambda r: -0.01 * r,
    "1": lambda r: 0 * r,
    "to exp(-20)": lambda r: -20 * r,
    "1e-30": lambda r: 0 * r - 69,
    "0": lambda r: torch.full_like(r, -torch.inf),
    "resets of 1e-30": lambda r: torch.where(r < 0.05, -69.0, -0.01 * r),
    "resets of 0": lambda r: torch.where(r < 0.05, -torch.inf, -0.01 * r),
}
HEADS = [(1, 1, 4), (2, 2, 4), (4, 4, 4), (4, 2, 1), (1, 1, 1)]  # of query, key and value; there are 4 gates
DOCUMENTS = [None, [0, 50, 0, 1, 80, 0], [131, 0]]
KINDS = ["plain", "gated", "delta", "gated delta", "features", "KDA"]


def inputs(
    kind: str, heads: tuple[int, int, int] = (2, 2, 4), gates: str = "to exp(-20)", batch: int = 2
) -> list[Tensor | None]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(batch, NODES, *shape, dtype=torch.float64)

    count = 4 if kind != "plain" else max(heads)
    key = torch.nn.functional.normalize(numbers(heads[1], WIDTH), dim=-1)
    log_gate = beta = None
    if kind in ("gated", "gated delta", "features", "KDA"):
        log_gate = GATES[gates](
            torch.rand(batch, NODES, 4, *[WIDTH] * (kind in ("features", "KDA")), dtype=torch.float64)
        )
    if kind in ("delta", "gated delta", "KDA"):
        beta = torch.rand(batch, NODES, 4, dtype=torch.float64)
        beta[:, ::7] = 0
    state = torch.randn(batch, count, WIDTH, DEEP, dtype=torch.float64)
    return [numbers(heads[0], WIDTH), key, numbers(heads[2], DEEP), log_gate, beta, state]


def results(
    function: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor | None], **options: object
) -> list[Tensor]:
    """Out, the last state, and the gradient of each input, of a loss that uses both."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    out, last = function(*leaves, **options)
    generator = torch.Generator().manual_seed(0)
    loss = sum(
        (x * torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype)).sum() for x in (out, last)
    )
    used = [x for x in leaves if x is not None]
    return [out.detach(), last.detach(), *torch.autograd.grad(loss, used)]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error, relative to the largest number of each tensor."""
    assert all(x.isfinite().all() for x in found)
    largest = [float(y.abs().max()) for y in expected]
    return max(
        float((x - y).abs().max()) / max(size, 1e-25) for x, y, size in zip(found, expected, largest, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
@pytest.mark.covering(times=2)
def test_values_and_gradients_are_those_of_the_twin(
    kind: str, heads: tuple[int, int, int], documents: list[int] | None
) -> None:
    given = inputs(kind, heads)
    options = {"scale": 0.3, "documents": documents}
    assert worst(results(recurrence, given, **options), results(twin.recurrence, given, **options)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS[-2:], ids=str)
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_the_reference_of_kernels_is_the_twin(
    kind: str, heads: tuple[int, int, int], documents: list[int] | None
) -> None:
    """From which derivatives of higher order are taken; 16-bit features are added up in float32 there, too."""
    given = inputs(kind, heads, "near 1")
    for state in (given[-1], None):
        tensors = [*given[:-1], state]
        ends = ends_of(documents, NODES)
        expected = twin.recurrence(*tensors, scale=0.3, documents=documents)
        found = reference.recurrence(0.3, 4 if kind != "plain" else max(heads), ends, *tensors)
        assert worst(list(found), list(expected)) < 1e-12
    short = [None if x is None else x.bfloat16() for x in given[:-1]]
    expected = twin.recurrence(*(None if x is None else x.double() for x in short), documents=documents)
    found = reference.recurrence(1.0, 4 if kind != "plain" else max(heads), ends, *short, None)
    assert worst([x.double() for x in found], list(expected)) < 1e-5


@pytest.mark.parametrize("kind", ["gated", "gated delta", "features", "KDA"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.covering
def test_any_gate_in_float32(kind: str, gates: str) -> None:
    given = inputs(kind, gates=gates)
    single = [None if x is None else x.float() for x in given]
    expected = results(twin.recurrence, [None if x is None else x.double() for x in single], scale=0.3)
    assert worst([x.double() for x in results(recurrence, single, scale=0.3)], expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_in_two_pieces(kind: str) -> None:
    given = inputs(kind, (4, 4, 4))
    whole, last = recurrence(*given)
    state, pieces = given[-1], []
    for piece in (slice(0, 1), slice(1, 49), slice(49, 50), slice(50, 53), slice(53, None)):
        out, state = recurrence(*(None if x is None else x[:, piece] for x in given[:-1]), state)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_sequence_longer_than_the_states_kept(kind: str) -> None:
    """Backward passes keep few states, and compute the others again: two pieces, which keep all of theirs, agree."""
    nodes = 64 * 48 + 100
    query, key, value = torch.randn(3, 1, nodes, 1, 5, dtype=torch.float64)
    features = [5] if kind in ("features", "KDA") else []
    log_gate = -torch.rand(1, nodes, 1, *features, dtype=torch.float64) if kind not in ("plain", "delta") else None
    beta = torch.rand(1, nodes, 1, dtype=torch.float64) if kind in ("delta", "gated delta", "KDA") else None
    state = torch.randn(1, 1, 5, 5, dtype=torch.float64)

    def in_pieces(*leaves: Tensor | None) -> tuple[Tensor, Tensor]:
        *rows, state = leaves
        cuts = [[None if x is None else x[:, part] for x in rows] for part in (slice(0, 1501), slice(1501, None))]
        early, between = recurrence(*cuts[0], state)
        late, last = recurrence(*cuts[1], between)
        return torch.cat([early, late], 1), last

    leaves = [query, torch.nn.functional.normalize(key, dim=-1), value, log_gate, beta, state]
    assert worst(results(recurrence, leaves), results(in_pieces, leaves)) < 1e-11


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the memory of the process from Linux")
@pytest.mark.parametrize("kind", ["gated", "gated delta", "KDA"])
@pytest.mark.sample(3)
def test_the_memory_of_gradients(kind: str) -> None:
    """Beside the gradients, and one value of each node: few states, not one for each chunk (57 to 113 MB here)."""
    nodes, width = 1 << 15, 128
    query, key, value = torch.randn(3, 1, nodes, 1, width)
    log_gate = -torch.rand(1, nodes, 1, *[width] * (kind == "KDA"))
    beta = None if kind == "gated" else torch.rand(1, nodes, 1)
    leaves = [x.requires_grad_() for x in (query, key / width, value, log_gate, beta) if x is not None]
    out, _ = recurrence(*leaves)
    sizes = sum(x.numel() for x in leaves) + (0 if beta is None else value.numel())

    def memory(name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return 1024 * int(line.split()[1])

    for _ in range(2):  # the first pass loads code
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in memory
        before = memory("VmRSS")
        grads = torch.autograd.grad(out, leaves, out.detach(), retain_graph=True)
        growth = memory("VmHWM") - before
        assert all(x.isfinite().all() for x in grads)
        del grads
    assert growth < 4 * sizes + (24 << 20)


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_features_are_added_up_in_float32(kind: str) -> None:
    given = [None if x is None else x.bfloat16() for x in inputs(kind, gates="near 1")]
    found = recurrence(*given)
    assert found[0].dtype == found[1].dtype == torch.float32
    expected = twin.recurrence(*(None if x is None else x.double() for x in given))
    assert worst([x.double() for x in found], list(expected)) < 1e-5
    out = recurrence(*(None if x is None else x.requires_grad_() for x in given))[0]
    assert torch.autograd.grad(out.sum(), given[0])[0].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_any_number_of_threads(kind: str) -> None:
    given, found = [None if x is None else x.float() for x in inputs(kind, (1, 1, 4), batch=1)], []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(recurrence, given))
    finally:
        torch.set_num_threads(before)
    assert all(x.equal(y) for again in found[1:] for x, y in zip(again, found[0], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_nodes_the_state_stays(kind: str) -> None:
    given = [None if x is None else x[:, :0] for x in inputs(kind)[:-1]]
    state = torch.randn(2, 4, WIDTH, DEEP, dtype=torch.float64)
    out, last = recurrence(*given, state)
    assert out.shape == (2, 0, 4, DEEP)
    assert last.equal(state)
    given[2].requires_grad_()
    for result in recurrence(*given, state):  # as with nodes
        assert torch.autograd.grad(result.sum(), given[2])[0].shape == given[2].shape


def test_strides_and_gradients_of_one_result() -> None:
    query, key, value, log_gate, beta, state = inputs("KDA", (4, 4, 4))
    plain = recurrence(query, key, value, log_gate, beta, state)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value, log_gate, beta)]
    assert recurrence(*heads_first, state)[0].equal(plain[0])
    assert recurrence(query.mT.contiguous().mT, key, value, log_gate, beta, state)[0].equal(plain[0])
    for result in (0, 1):
        grads = [
            torch.autograd.grad(f(query, key, value.requires_grad_(), log_gate, beta, state)[result].sum(), value)
            for f in (recurrence, twin.recurrence)
        ]
        torch.testing.assert_close(*grads)


@torch.no_grad()
def test_tangents_are_refused_and_not_lost() -> None:
    query, key, value, *rest = inputs("KDA", (4, 4, 4))
    x, dt, *more = selective(8, 16)
    for f, primal in (
        (lambda y: recurrence(y, key, value, *rest)[0], query),
        (lambda y: selective_scan(y, dt, *more)[0], x),
    ):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            f(forward_ad.make_dual(primal, primal))


def test_what_does_not_fit_is_named() -> None:
    query, key, value, log_gate, _, state = inputs("gated")
    with pytest.raises(ValueError, match=r"log_gate must have shape \[2, 131, 4\]; got \[2, 131, 3\]"):
        recurrence(query, key, value, log_gate[..., :3])
    with pytest.raises(ValueError, match="state must have shape"):
        recurrence(query, key, value, log_gate, state=state.mT)
    with pytest.raises(ValueError, match="lengths of documents must sum to the 131 nodes"):
        recurrence(query, key, value, log_gate, documents=[100])
    with pytest.raises(ValueError, match="heads that divide 4"):
        recurrence(query[:, :, :1].expand(-1, -1, 3, -1), key, value, log_gate)
    for wrong in (key[:, 1:], key[1:], key.repeat(1, 2, 1, 1)):  # other nodes or entries, with heads that divide 4
        with pytest.raises(ValueError, match=r"key must have shape \[2, 131, heads that divide 4, width\]"):
            recurrence(query, wrong, value, log_gate)
    for wrong in (None, 1.0, key.int(), key.to(torch.complex64), key.to(torch.float8_e4m3fn)):
        with pytest.raises(TypeError, match="key must be a floating-point tensor of 16 bits or more; got"):
            recurrence(query, wrong, value, log_gate)
    with pytest.raises(ValueError, match=r"value must have shape \[B, N, H, width\]; got \[131"):
        recurrence(query, key, value[0], log_gate)


# ------------------------------------------------------------------------------------------------ by Triton


@pytest.mark.parametrize(
    ("dtype", "width", "ends", "chunked"),
    [
        (torch.bfloat16, 128, [4096], True),
        (torch.float32, 256, [16], True),
        (torch.float32, 64, [1], False),  # a step of decoding
        (torch.float32, 64, [1, 2, 40], False),
        (torch.float32, 257, [4096], False),
        (torch.float64, 64, [4096], False),
    ],
    ids=str,
)
def test_which_recurrences_run_in_chunks(dtype: torch.dtype, width: int, ends: list[int], chunked: bool) -> None:
    assert in_chunks(dtype, width, 64, ends) == chunked
    assert in_chunks(dtype, 64, width, ends) == chunked


def by_triton(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor | None, beta: Tensor | None, state: Tensor | None,
    *, scale: float = 1.0, documents: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from mpnn.kernels.derivatives import launch
    from mpnn.kernels.recurrent import reference
    from mpnn.kernels.recurrent.cuda.recurrence import KERNEL

    tensors = [None if x is None else x.to(TRITON.device) for x in (query, key, value, log_gate, beta, state)]
    ends = [sum(documents[: n + 1]) for n, length in enumerate(documents) if length] if documents else [query.shape[1]]
    heads = max(x.shape[2] for x in tensors[:5] if x is not None)
    options = scale, heads, tuple(ends)
    out, last = launch(KERNEL, options, partial(reference.recurrence, *options), *tensors)
    return out.cpu(), last.cpu()


@on_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "documents"), [((1, 1, 4), [0, 5, 0, 1, 6, 0]), ((4, 2, 1), None)], ids=str)
def test_triton_agrees_with_the_twin(
    kind: str, heads: tuple[int, int, int], documents: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpnn.kernels.recurrent.cuda import recurrence as kernels

    monkeypatch.setattr(kernels, "_NUMBERS", 256)  # two blocks of columns
    given = [x if x is None or n == 5 else x[:, :12] for n, x in enumerate(inputs(kind, heads, batch=1))]
    options = {"scale": 0.3, "documents": documents}
    assert worst(results(by_triton, given, **options), results(twin.recurrence, given, **options)) < 1e-12


def small(kind: str, heads: tuple[int, int, int], gates: str = "to exp(-20)", nodes: int = 11) -> list[Tensor | None]:
    """Inputs of few nodes, features and heads, of the type that chunks take: rounded to float32."""
    query, key, value, log_gate, beta, state = inputs(kind, heads, gates, batch=1)
    log_gate = log_gate if log_gate is None or log_gate.dim() == 3 else log_gate[..., :10]
    numbers = [None if x is None else x[:, :, :2] for x in (log_gate, beta)]
    rows = [None if x is None else x[:, :nodes] for x in (query[..., :10], key[..., :10], value[..., :9], *numbers)]
    return [None if x is None else x.float() for x in (*rows, state[:, :2, :10, :9])]


def doubled(given: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in given]


def by_chunks(
    *given: Tensor | None, scale: float = 1.0, documents: list[int] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    from mpnn.kernels.recurrent.cuda.chunks import function

    tensors = [None if x is None else x.to(TRITON.device) for x in given]
    ends = ends_of(documents, given[0].shape[1])
    heads = max(x.shape[2] for x in tensors[:5] if x is not None)
    out, last = function.run(*tensors, scale, heads, ends, dtype)
    return out.cpu(), last.cpu()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 nodes, and blocks of 8 rows and columns where the interpreter runs them."""
    from mpnn.kernels.recurrent.cuda.chunks import function

    if INTERPRETED:
        launch = function.Launch(columns=8)
        config = function.Config(8, 8, *[launch] * 8)
        monkeypatch.setattr(function, "_LEAST", 8)
        monkeypatch.setattr(function, "config", lambda *of: config)


@on_triton
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "documents"), [((1, 1, 2), [0, 2, 0, 9, 0]), ((2, 1, 1), None)], ids=str)
def test_chunks_agree_with_the_twin(kind: str, heads: tuple[int, int, int], documents: list[int] | None) -> None:
    given, options = small(kind, heads, "near 1"), {"scale": 0.3, "documents": documents}
    expected = results(twin.recurrence, doubled(given), **options)
    assert worst([x.double() for x in results(by_chunks, given, **options)], expected) < 2e-6


@on_triton
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["gated delta", "KDA"])
@pytest.mark.parametrize("gates", ["1e-30", "resets of 0"])
def test_chunks_take_any_gate(kind: str, gates: str) -> None:
    given = small(kind, (1, 1, 2), gates)
    expected = results(twin.recurrence, doubled(given))
    assert worst([x.double() for x in results(by_chunks, given)], expected) < 2e-6


@on_triton
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["gated", "KDA"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_chunks_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    """Numbers of a chunk are rounded some five times: to bfloat16, or to TF32, which has 11 bits as float16 has."""
    given = [x if x is None or n > 2 else x.to(dtype) for n, x in enumerate(small(kind, (1, 1, 2), "near 1", nodes=9))]
    expected = results(twin.recurrence, doubled(given))
    found = results(lambda *x: by_chunks(*x, dtype=dtype), given)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    assert worst([x.double() for x in found], expected) < 5 * (2**-10 if dtype == torch.float16 else 2**-7)


@on_triton
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["gated", "KDA"])
def test_a_document_in_chunks_knows_nothing_of_the_others(kind: str) -> None:
    given = small(kind, (1, 1, 2))
    other = [None if x is None else x.clone() for x in given]
    for x in other[:5]:
        if x is not None:
            x[:, :5] = 3 * x[:, :5]
    (plain, _), (changed, _) = (by_chunks(*x[:5], None, documents=[5, 6]) for x in (given, other))
    assert plain[:, 5:].equal(changed[:, 5:])
    assert not plain[:, :5].equal(changed[:, :5])


@on_triton
@pytest.mark.usefixtures("small_chunks")
def test_chunks_in_a_compiled_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the recurrence whole, and its gradient."""
    monkeypatch.setattr(scan, "by_triton", lambda x: True)
    monkeypatch.setattr(scan, "_CHUNKED_NODES", 4)
    leaves = [None if x is None else x.to(TRITON.device).requires_grad_() for x in small("gated delta", (1, 1, 2))]

    def loss(*inputs: Tensor | None) -> Tensor:
        out, last = recurrence(*inputs, unit=True, documents=[4, 7])
        return out.square().sum() + last.sum()

    found, expected = (
        torch.autograd.grad(f(*leaves), leaves)
        for f in (torch.compile(loss, backend="aot_eager", fullgraph=True), loss)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@on_triton
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("run", [by_triton, by_chunks])
def test_a_call_neither_waits_for_a_gpu_nor_copies_to_it(run: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """But the first of its documents, whose ends it copies."""
    given = [None if x is None else x.requires_grad_() for x in small("gated delta", (1, 1, 2), nodes=9)]
    waits: list[str] = []

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, options = str(function), kwargs or {}
            is_sized = "repeat_interleave" not in name or options.get("output_size") is not None
            if not is_sized or any(word in name for word in ("_local_scalar_dense", "lift_fresh", "nonzero")):
                waits.append(name)
            return function(*args, **options)

    for _ in range(2):
        waits.clear()
        with Waits():
            out, last = run(*given, documents=[4, 5])
            (out.sum() + last.sum()).backward()
    assert waits == []


@on_triton
@pytest.mark.parametrize("gates", ["1e-30", "resets of 0"])
def test_triton_takes_any_gate_and_16_bits(gates: str) -> None:
    given = [x if x is None or n == 5 else x[:, :9] for n, x in enumerate(inputs("KDA", (2, 2, 4), gates, batch=1))]
    single = [None if x is None else x.float() for x in given]
    expected = results(twin.recurrence, [None if x is None else x.double() for x in single], scale=0.3)
    assert worst([x.double() for x in results(by_triton, single, scale=0.3)], expected) < 1e-5
    halves = [x.half() if n < 3 else x for n, x in enumerate(single) if x is not None]
    expected = list(twin.recurrence(*(x.double() for x in halves)))
    found = by_triton(*halves)
    assert found[0].dtype == torch.float32
    assert worst([x.double() for x in found], expected) < 1e-5


# ------------------------------------------------------------------------------------------------ selective scan


def selective(channels: int, states: int, nodes: int = 75) -> list[Tensor]:
    x, dt = torch.randn(2, 2, nodes, channels, dtype=torch.float64)
    B, C = torch.randn(2, 2, nodes, states, dtype=torch.float64)
    A = -torch.arange(1.0, states + 1).repeat(channels, 1).double()
    return [x, torch.nn.functional.softplus(dt), A, B, C, torch.randn(2, channels, states, dtype=torch.float64)]


@pytest.mark.parametrize("sizes", [(8, 16), (24, 16), (3, 5), (40, 33)], ids=str)
@pytest.mark.parametrize("documents", [None, [0, 32, 1, 0, 42], [75, 0]], ids=str)
def test_the_selective_scan(sizes: tuple[int, int], documents: list[int] | None) -> None:
    given = selective(*sizes)
    found, expected = (results(f, given, documents=documents) for f in (selective_scan, twin.selective_scan))
    assert worst(found, expected) < 1e-12
    single = results(selective_scan, [x.float() for x in given], documents=documents)
    assert worst([x.double() for x in single], expected) < 1e-5


def twin_of_layer(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, bias: Tensor, D: Tensor, z: Tensor
) -> Tensor:
    step = torch.nn.functional.softplus(dt + bias)
    y, last = twin.selective_scan(x, step, A, B, C, state, documents=[1, 5])
    return ((y + D * x) * torch.nn.functional.silu(z)).square().sum() + last.sum()


@pytest.mark.parametrize("documents", [None, [0, 5, 1, 7]], ids=str)
def test_second_derivatives_of_the_selective_scan(documents: list[int] | None) -> None:
    given = selective(3, 5, nodes=13)

    def derivatives(function: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in given]
        out, last = function(*leaves, documents=documents)
        first = torch.autograd.grad(out.sin().sum() + last.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)
        return [x.detach() for x in (*first, *second)]

    assert worst(derivatives(selective_scan), derivatives(twin.selective_scan)) < 1e-9


def test_the_selective_scan_in_two_pieces_and_without_nodes() -> None:
    x, dt, A, B, C, state = selective(24, 16)
    y, last = selective_scan(x, dt, A, B, C, state)
    a, between = selective_scan(x[:, :40], dt[:, :40], A, B[:, :40], C[:, :40], state)
    b, end = selective_scan(x[:, 40:], dt[:, 40:], A, B[:, 40:], C[:, 40:], between)
    torch.testing.assert_close(torch.cat([a, b], 1), y)
    torch.testing.assert_close(end, last)
    assert selective_scan(x[:, :0], dt[:, :0], A, B[:, :0], C[:, :0], state)[1].equal(state)
    with pytest.raises(ValueError, match="A must have shape"):
        selective_scan(x, dt, A[:3], B, C)


@pytest.mark.parametrize("channels", [24, 16, 40, 5])
@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_the_selective_scan_of_a_layer(channels: int, softplus: bool, strided: bool) -> None:
    """Step, skip and factor inside the pass over nodes, without gradients, and around it with gradients."""
    x, dt, A, B, C, state = selective(channels, 16)
    x = x.mT.contiguous().mT if strided else x
    bias, D = torch.randn(2, channels, dtype=torch.float64)
    bias, z = bias + (0 if softplus else 5), torch.randn_like(x)
    raw = dt - 0.5 * torch.rand_like(dt)
    step = torch.nn.functional.softplus(raw + bias) if softplus else raw + bias
    y, last = twin.selective_scan(x, step, A, B, C, state, documents=[0, 32, 1, 42])
    expected = [(y + D * x) * torch.nn.functional.silu(z), last]
    tensors = [x, raw, A, B, C, state]
    options = {"documents": [0, 32, 1, 42], "softplus": softplus}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = selective_scan(*tensors, **options, bias=bias, D=D, z=z)  # type: ignore[arg-type]
            assert worst(list(found), expected) < 1e-12
            numbers = [t.float() for t in (*tensors, bias, D, z)]
            single = selective_scan(*numbers[:6], **options, **dict(zip(("bias", "D", "z"), numbers[6:], strict=True)))
            assert worst([t.double() for t in single], expected) < 1e-5


@torch.no_grad()
def test_the_selective_scan_reads_rows_where_they_lie() -> None:
    """And copies what has its nodes side by side."""
    x, dt, A, B, C, state = (t.float() for t in selective(16, 16))
    z = torch.randn_like(x)
    expected = selective_scan(x, dt, A, B, C, state, z=z)
    turned = [t.mT.contiguous().mT for t in (x, dt, z)]
    for given in ((turned[0], dt, z), (x, turned[1], z), (x, dt, turned[2]), turned):
        found = selective_scan(given[0], given[1], A, B, C, state, z=given[2])
        assert all(map(torch.equal, found, expected))


def test_a_step_far_below_and_above_zero_is_softplus() -> None:
    raw = torch.tensor([-200.0, -80, -30, -1e-3, 0, 1e-3, 30, 90, 200] + [0.0] * 7).expand(1, 1, 16)
    one, zero = torch.ones(1, 1, 16), torch.zeros(16, 16)
    with torch.no_grad():  # A of zero: h = dt x B, and y = 16 h
        y, _ = selective_scan(one, raw, zero, one, one, softplus=True)
    torch.testing.assert_close(y, 16 * torch.nn.functional.softplus(raw), rtol=2e-6, atol=0)


# -------------------------------------------------------------------------------------- selective scan by Triton


@pytest.fixture
def scanned_by_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, Tensor]]:
    """`selective_scan` as on a GPU; in the interpreter over chunks of 4 nodes and 4 channels."""
    from mpnn.kernels.recurrent.cuda import selective_scan as kernels

    monkeypatch.setattr(module, "by_triton", lambda x: True)
    if INTERPRETED:
        for name, number in {"_NODES": 4, "_FEW": 2, "_CHANNELS": 4, "_TOGETHER": 2}.items():
            monkeypatch.setattr(kernels, name, number)

    def run(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        y, last = selective_scan(*(x.to(TRITON.device) for x in given), **options)
        return y.cpu(), last.cpu()

    return run


@on_triton
@pytest.mark.parametrize(
    ("dtype", "documents", "bar"),
    [
        (torch.float64, None, 1e-12),
        (torch.float64, [0, 3, 1, 0, 3], 1e-12),
        (torch.float32, [4, 3], 1e-5),
        (torch.float16, None, 2**-10),
        (torch.bfloat16, [5, 2], 2**-7),
    ],
    ids=str,
)
def test_triton_scans_as_the_twin(
    dtype: torch.dtype, documents: list[int] | None, bar: float, scanned_by_triton: Any, poisoned: None
) -> None:
    """Each result has the same bits the second time. A 16-bit gradient is rounded once."""
    x, dt, A, B, C, state = (t if t.dim() == 2 else t[:1] for t in selective(5, 3, nodes=7))
    wide = torch.promote_types(dtype, torch.float32)
    given = [x.to(dtype), dt.to(wide), A.to(wide), B.to(dtype), C.to(dtype), state.to(wide)]
    found, again = (results(scanned_by_triton, given, documents=documents) for _ in range(2))
    assert all(map(torch.equal, found, again))
    assert found[0].dtype == wide
    expected = results(twin.selective_scan, [t.double() for t in given], documents=documents)
    assert worst([t.double() for t in found], expected) < bar


@on_triton
def test_triton_scans_whole_layers_in_compiled_programs(scanned_by_triton: Any) -> None:
    """Step, skip and factor are around the operator, which a program holds whole."""
    tensors = [t.float() for t in (*selective(5, 2, nodes=6), *torch.randn(2, 5), torch.randn(2, 6, 5))]
    leaves = [t.to(TRITON.device).requires_grad_() for t in tensors]

    def loss(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *more: Tensor) -> Tensor:
        around = dict(zip(("bias", "D", "z"), more, strict=True))
        y, last = selective_scan(x, dt, A, B, C, state, documents=[1, 5], softplus=True, **around)
        return y.square().sum() + last.sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        expected_loss = twin_of_layer(*(x.double().cpu() for x in leaves))
    torch.testing.assert_close(loss(*leaves).detach().double().cpu(), expected_loss, rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------------------ one token


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("sizes", [(4, 2, 64, 128), (3, 1, 5, 7), (2, 2, 16, 33)], ids=str)
def test_one_token_of_mamba2(sizes: tuple[int, int, int, int], full: bool) -> None:
    heads, groups, values, keys = sizes
    state, x, z = torch.randn(2, heads, values, keys), *torch.randn(2, 2, heads, values)
    dt, A = torch.randn(2, heads), -torch.rand(heads)
    B, C = torch.randn(2, 2, groups, keys)
    bias, D = torch.randn(2, heads)
    step = torch.nn.functional.softplus(dt + bias) if full else dt
    b, c = (y.double().repeat_interleave(heads // groups, 1)[:, :, None] for y in (B, C))
    new = (step * A).double().exp()[..., None, None] * state + (step[..., None] * x)[..., None] * b
    expected = (new * c).sum(-1)
    expected = (expected + D[:, None] * x) * torch.nn.functional.silu(z) if full else expected
    options = {"softplus": True, "bias": bias, "D": D, "z": z} if full else {}
    out = state_update(state, x, dt, A, B, C, **options)
    assert worst([out.double(), state.double()], [expected, new]) < 2e-6


def test_one_token_refuses_what_it_would_write_wrong() -> None:
    state, x, dt, A, B = (
        torch.zeros(1, 2, 3, 4),
        torch.ones(1, 2, 3),
        torch.ones(1, 2),
        torch.ones(2),
        torch.ones(1, 1, 4),
    )
    with pytest.raises(ValueError, match="float32 and contiguous"):
        state_update(state.mT.contiguous().mT, x, dt, A, B, B)
    with pytest.raises(ValueError, match="3 groups of B and C do not divide 2 heads"):
        state_update(state, x, dt, A, *[torch.ones(1, 3, 4)] * 2)
    with pytest.raises(ValueError, match="D must have shape"):
        state_update(state, x, dt, A, B, B, D=torch.ones(3))
    for k, name in enumerate(("x", "dt", "A", "B", "C")):
        arguments = [x, dt, A, B, B]
        arguments[k] = None
        with pytest.raises(TypeError, match=f"{name} must be a floating-point tensor of 16 bits or more; got NoneType"):
            state_update(state, *arguments)
    assert not state.any()


@pytest.mark.parametrize("kind", ["plain", "gated delta", "KDA"])
def test_queries_and_keys_of_unit_length(kind: str) -> None:
    """Inside the kernel for a few nodes without gradients, in torch for more."""
    query, key, *rest, state = inputs(kind)
    for nodes in (1, 3, NODES):
        some = [None if y is None else y[:, :nodes].float() for y in (3 * query, 5 * key, *rest)]  # type: ignore[operator]
        unit = [y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in some[:2]]  # type: ignore[operator]
        with torch.no_grad():
            found = recurrence(*some, state.float(), unit=True)  # type: ignore[arg-type, union-attr]
            expected = recurrence(*unit, *some[2:], state.float())  # type: ignore[arg-type, union-attr]
        assert worst(list(found), list(expected)) < 2e-6
