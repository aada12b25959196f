"""mpnn.kernels.recurrent.scan: few nodes, memory of any kind, and what is asked of a tensor before a kernel runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn.kernels import memory
from mpnn.kernels.cpu import library
from mpnn.kernels.recurrent import reference, scan
from mpnn.kernels.recurrent.scan import Block, ends_of, recurrence

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")
WIDTH, DEEP, HEADS = 5, 3, 4
KINDS = ["plain", "gated", "delta", "gated delta", "features", "KDA"]


def inputs(kind: str, nodes: int, heads: tuple[int, int, int], batch: int) -> list[Tensor | None]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(batch, nodes, *shape, dtype=torch.float64)

    log_gate = beta = None
    if kind in ("gated", "gated delta"):
        log_gate = -numbers(HEADS).abs()
    if kind in ("features", "KDA"):
        log_gate = -numbers(HEADS, WIDTH).abs()
    if kind in ("delta", "gated delta", "KDA"):
        beta = numbers(HEADS).sigmoid()
    state = torch.randn(batch, HEADS, WIDTH, DEEP, dtype=torch.float64)
    return [numbers(heads[0], WIDTH), numbers(heads[1], WIDTH), numbers(heads[2], DEEP), log_gate, beta, state]


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel does not write is NaN."""

    def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return memory.empty(like, *shape, dtype=dtype).fill_(torch.nan)

    monkeypatch.setattr(scan, "empty", empty)


@pytest.mark.usefixtures("spoiled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(4, 4, 4), (2, 2, 4), (1, 1, 4), (4, 1, 2), (2, 4, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("documents", [[1], [3], [4], [1, 2], [1, 1, 1], [2, 0, 30], [70, 5]], ids=str)
@pytest.mark.covering(times=3)
def test_few_nodes_and_short_documents(
    kind: str, heads: tuple[int, int, int], batch: int, documents: list[int]
) -> None:
    nodes = sum(documents)
    given = inputs(kind, nodes, heads, batch)
    present = [x.requires_grad_() for x in given if x is not None]
    found = recurrence(*given, scale=0.4, documents=documents)  # type: ignore[arg-type]
    expected = reference.recurrence(0.4, HEADS, ends_of(documents, nodes), *given)
    torch.testing.assert_close(found, expected)
    upstream = [torch.randn_like(x) for x in found]
    of_both = (torch.autograd.grad(x, present, upstream, materialize_grads=True) for x in (found, expected))
    torch.testing.assert_close(*of_both)
    with torch.no_grad():
        torch.testing.assert_close(recurrence(*given, scale=0.4, documents=documents), found)  # type: ignore[arg-type]


def test_features_of_any_strides() -> None:
    query, key, value, *more = inputs("gated delta", 9, (4, 4, 4), 2)
    expected = recurrence(query, key, value, *more)  # type: ignore[arg-type]
    for stored in ((0, 2, 3, 1), (3, 2, 1, 0), (2, 0, 1, 3)):
        back = [stored.index(k) for k in range(4)]
        others = [x.permute(stored).contiguous().permute(back) for x in (query, key, value) if x is not None]
        torch.testing.assert_close(recurrence(*others, *more), expected)  # type: ignore[misc]
    others = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in (query, key, value) if x is not None]
    torch.testing.assert_close(recurrence(*others, *more), expected)  # type: ignore[misc]
    others = [torch._neg_view(-x) for x in (query, key, value) if x is not None]
    torch.testing.assert_close(recurrence(*others, *more), expected)  # type: ignore[misc]


def test_lengths_are_divided_out_with_and_without_gradients() -> None:
    query, key, *others = inputs("gated", 9, (2, 2, 4), 2)
    assert query is not None
    assert key is not None
    units = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)]
    expected = recurrence(*units, *others)  # type: ignore[misc]
    torch.testing.assert_close(recurrence(query, key, *others, unit=True), expected)  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(recurrence(query, key, *others, unit=True), expected)  # type: ignore[arg-type]
    small = 1e-4 * query
    torch.testing.assert_close(scan._unit(small), small / (small.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert scan._unit(small.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("nodes", [0, 5])
def test_dtypes_of_results(grad: bool, nodes: int) -> None:
    given: Any = [x if x is None else x.bfloat16().requires_grad_(grad) for x in inputs("gated", nodes, (2, 2, 4), 1)]
    for dtype, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)):
        out, last = recurrence(*given, dtype=dtype)
        assert (out.dtype, last.dtype) == (expected, torch.float32)


def test_ends_of_documents() -> None:
    assert ends_of(None, 3) == (3,)
    assert ends_of(None, 0) == ()
    assert ends_of([], 0) == ()
    assert ends_of([0, 2, 0, 1], 3) == (2, 3)
    for lengths, nodes in (([], 1), ([2], 3), ([4, -1], 3), ([2, 2], 3)):
        with pytest.raises(ValueError, match="must sum to"):
            ends_of(lengths, nodes)


def test_tangents_are_refused() -> None:
    x = torch.randn(3)
    scan.refuse_tangents([x, None])
    with forward_ad.dual_level():
        scan.refuse_tangents([x, None])
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            scan.refuse_tangents([None, x, forward_ad.make_dual(x, x)])


def test_which_tensors_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = torch.zeros(1)
    on_gpu: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), is_cpu=False)
    elsewhere: Any = torch.zeros(1, device="meta")
    for library_misses, gpu_misses, expected in (
        (None, None, (True, True, False)),
        ("it is missing", None, (False, True, False)),
        (None, "there is no GPU", (True, False, False)),
    ):
        monkeypatch.setattr(library, "why_missing", lambda why=library_misses: why)
        monkeypatch.setattr(scan, "unavailable", lambda *_, why=gpu_misses: why)
        assert tuple(map(scan.serves, (on_cpu, on_gpu, elsewhere))) == expected
        assert scan.has_kernel(on_cpu)
        assert not scan.has_kernel(elsewhere)
    monkeypatch.setattr(library, "why_missing", lambda: "it is missing")
    with pytest.raises(RuntimeError, match="no compiled kernels for recurrences: it is missing"):
        scan.check_device(on_cpu, "recurrences")
    with pytest.raises(RuntimeError, match="they are on CPU only"):
        scan.check_device(elsewhere, "recurrences")


def test_linear_attention_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(1, 6, 2, 1, 4) for _ in range(3))
    blocks = [*Block(0, 6, 0, 6, scan.PAST)]
    expected = scan.linear_attention(query, key, value, 0.3, blocks)
    monkeypatch.setattr(library, "why_missing", lambda: "it is missing")
    monkeypatch.setattr(library, "run", None)
    torch.testing.assert_close(scan.linear_attention(query, key, value, 0.3, blocks), expected)


@pytest.mark.parametrize(
    ("threads", "states", "columns", "parts"),
    [(1, 1, 500, 1), (4, 1, 500, 4), (4, 3, 500, 2), (4, 4, 500, 1), (4, 9, 500, 1), (4, 1, 64, 2), (4, 1, 65, 3)],
)
def test_columns_are_divided_if_states_are_too_few(
    threads: int, states: int, columns: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert scan._column_parts(states, columns) == parts
