"""What a mask_mod or a score_mod reads may change between calls, and counts in the next one.

This library's masks are then those of the function as it is, as in torch's function without a compiler. torch's own
block masks keep the blocks that they list, as in torch's kernel: full blocks are not asked, and partial blocks are
asked in each call.
"""

import copy
import pickle
import shutil
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as of_torch

from mpnn import flex
from mpnn.flex import masks, programs

N, HEADS, WIDTH = 40, 2, 8
Mod = Callable[..., Any]
CAUSAL: Mod = lambda b, h, q, kv: q >= kv  # noqa: E731


def features(count: int = N) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, count, WIDTH, generator=generator) for _ in range(3)]


def attend(mod: Mod | None = None, mask: Any = None, count: int = N) -> Tensor:
    return flex.flex_attention(*features(count), mod, mask)


# ---------------------------------------------------------------------------------------- ways to read and to change

OFFSET = torch.tensor(0)
SETTINGS = {"offset": 0}


class Rule:
    """A rule as an object, with its numbers in attributes."""

    def __init__(self) -> None:
        self.offset = torch.tensor(0)
        self.window = 5
        self.inner = SimpleNamespace(tables=[torch.arange(N) // 7])

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        table = self.inner.tables[0]
        return (kv <= q + self.offset) & (q - kv < self.window) | (table[q] == table[kv])

    def method(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.helper(q, kv)

    def helper(self, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q + self.offset


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(0))

    def forward(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q + self.offset


def by_closure() -> tuple[Mod, list[Callable[[], Any]]]:
    offset, document = torch.tensor(0), torch.arange(N) // 9

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q + offset) & (document[q] == document[kv])

    def rebind() -> None:
        nonlocal offset
        offset = torch.tensor(-3)

    return rule, [
        lambda: offset.fill_(4),
        lambda: document.data[20:].add_(1),
        lambda: document.numpy().__setitem__(slice(0, 3), 7),
        rebind,
    ]


def by_global() -> tuple[Mod, list[Callable[[], Any]]]:
    OFFSET.zero_()
    SETTINGS["offset"] = 0
    rule = lambda b, h, q, kv: kv <= q + OFFSET + SETTINGS["offset"]  # noqa: E731
    return rule, [lambda: OFFSET.add_(2), lambda: SETTINGS.update(offset=-5)]


def by_default() -> tuple[Mod, list[Callable[[], Any]]]:
    first = torch.tensor([9])

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, lengths: Tensor = first, *, w: int = 3) -> Tensor:
        return (kv < lengths[0]) | (q - kv < w)

    return rule, [lambda: rule.__defaults__[0].fill_(20), lambda: rule.__kwdefaults__.update(w=9)]  # type: ignore[index, union-attr]


def by_partial() -> tuple[Mod, list[Callable[[], Any]]]:
    lengths = torch.tensor([9])
    rule = partial(lambda lengths, b, h, q, kv, w: (kv < lengths[0]) | (q - kv < w), lengths, w=torch.tensor(2))
    return rule, [lambda: lengths.fill_(20), lambda: rule.keywords["w"].fill_(7)]


def by_object() -> tuple[Mod, list[Callable[[], Any]]]:
    rule = Rule()
    return rule, [
        lambda: rule.offset.fill_(3),
        lambda: setattr(rule, "window", 9),
        lambda: setattr(rule, "offset", torch.tensor(6)),
        lambda: rule.inner.tables[0].add_(torch.arange(N) % 2),
        lambda: rule.inner.tables.__setitem__(0, torch.zeros(N)),
    ]


def by_method() -> tuple[Mod, list[Callable[[], Any]]]:
    rule = Rule()
    return rule.method, [lambda: rule.offset.fill_(3), lambda: setattr(rule, "helper", lambda q, kv: q > kv)]


def by_module() -> tuple[Mod, list[Callable[[], Any]]]:
    layer = Layer()
    return layer, [
        lambda: layer.offset.fill_(3),
        lambda: layer.load_state_dict({"offset": torch.tensor(-2)}),
        lambda: setattr(layer, "forward", lambda b, h, q, kv: q == kv),
    ]


def by_composition() -> tuple[Mod, list[Callable[[], Any]]]:
    offset, table = torch.tensor(0), torch.arange(N)
    rule = of_torch.or_masks(
        of_torch.and_masks(lambda b, h, q, kv: q >= kv + offset, lambda b, h, q, kv: table[q] - table[kv] < 4),
        lambda b, h, q, kv: kv < (2 * table)[3],
    )
    return rule, [lambda: offset.fill_(1), lambda: table.mul_(2)]


def by_state() -> tuple[Mod, list[Callable[[], Any]]]:
    """A rule that branches on what it captures."""
    strict = torch.tensor(False)
    rule = lambda b, h, q, kv: q > kv if bool(strict) else q >= kv - 1  # noqa: E731
    return rule, [lambda: strict.fill_(True)]


def by_shared_memory() -> tuple[Mod, list[Callable[[], Any]]]:
    document = (torch.arange(N) // 9).share_memory_()
    other = torch.empty(0, dtype=torch.int64).set_(document.untyped_storage())
    return (lambda b, h, q, kv: document[q] == document[kv]), [lambda: other[5:].zero_()]


WAYS = (by_closure, by_global, by_default, by_partial, by_object, by_method, by_module, by_composition, by_state)
MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", [*WAYS, by_shared_memory])
def test_what_a_mask_mod_reads(way: Any, mode: str) -> None:
    rule, changes = way()
    with MODES[mode]():
        mask = flex.create_block_mask(rule, None, None, N, N)
        # torch counts the arguments of a function, which an object does not tell. This mask has one partial block.
        plain = lambda b, h, q, kv: rule(b, h, q, kv)  # noqa: E731
        theirs = of_torch.create_block_mask(plain, None, None, N, N, device="cpu")
        before = attend(mask=mask)
        assert attend(mask=theirs).equal(before)
        for change in changes:
            change()
            expected = attend(mask=flex.create_block_mask(rule, None, None, N, N))
            assert attend(mask=mask).equal(expected)
            assert attend(mask=theirs).equal(expected)
            assert not expected.equal(before), "the change is one"
            assert attend(mask=mask).equal(expected)
            before = expected


def test_what_a_score_mod_reads() -> None:
    slopes = torch.ones(HEADS)
    limit = torch.tensor(3)

    def fresh(slopes: Tensor, limit: Tensor) -> Mod:
        return lambda s, b, h, q, kv: torch.where(q - kv < limit, s + slopes[h] * (kv - q), -torch.inf)

    mod = fresh(slopes, limit)
    before = attend(mod)
    for change in (lambda: slopes.mul_(2), lambda: slopes.numpy().fill(0.5), lambda: limit.data.add_(9)):
        change()
        expected = attend(fresh(slopes.clone(), limit.clone()))
        assert attend(mod).equal(expected)
        assert not expected.equal(before)
        before = expected


def test_another_function_may_be_assigned() -> None:
    mask = flex.create_block_mask(CAUSAL, None, None, N, N)
    mask.mask_mod = lambda b, h, q, kv: q == kv
    assert mask.graphs[0][0].num_edges == N
    assert mask.shape == (1, 1, N, N)


def test_a_mask_that_begins_to_depend_on_heads() -> None:
    width = torch.ones(HEADS, dtype=torch.int64)
    rule = SimpleNamespace(of=lambda b, h, q, kv: (q - kv).abs() < 3)
    mask = flex.create_block_mask(lambda *at: rule.of(*at), 1, HEADS, N, N)
    assert mask.shape == (1, 1, N, N)
    rule.of = lambda b, h, q, kv: (q - kv).abs() < 3 + h * width[h]
    assert mask.shape == (1, HEADS, N, N)
    assert mask.depends_on == {1}
    assert attend(mask=mask).equal(attend(mask=flex.create_block_mask(rule.of, 1, HEADS, N, N)))


def test_graphs_stay_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    document = torch.arange(N) // 9
    nothing = torch.full((N,), torch.nan)
    rule = lambda b, h, q, kv: (document[q] == document[kv]) & ~(nothing[q] > 0)  # noqa: E731
    mask = flex.create_block_mask(rule, None, None, N, N)
    theirs = of_torch.create_block_mask(rule, None, None, N, N, device="cpu")
    attend(mask=theirs)
    monkeypatch.setattr(masks, "graphs_of", None)
    graph = mask.graphs[0][0]
    for _ in range(3):
        attend(mask=mask)
        attend(mask=theirs)
        document.copy_(document.clone())  # the same numbers
    assert mask.graphs[0][0] is graph


def test_tensors_that_cannot_be_compared_are_asked_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.eye(N).to_sparse()
    mask = flex.create_block_mask(lambda b, h, q, kv: table.to_dense()[q, kv] > 0, None, None, N, N)
    assert mask.graphs[0][0].num_edges == N
    made = []
    graphs_of = masks.graphs_of
    monkeypatch.setattr(masks, "graphs_of", lambda *a: (made.append(1), graphs_of(*a))[1])
    attend(mask=mask)
    attend(mask=mask)
    assert len(made) == 2


def test_a_tensor_of_another_class_is_refused() -> None:
    class Own(Tensor):
        pass

    document = (torch.arange(N) // 9).as_subclass(Own)
    with pytest.raises(ValueError, match="mask_mod captures a Own, and may compute"):
        flex.create_block_mask(lambda b, h, q, kv: document[q] == document[kv], None, None, N, N)


def test_captured_tensors_with_repeated_dimensions() -> None:
    row = torch.arange(N) // 9
    wide = row.expand(1000, N)
    mask = flex.create_block_mask(lambda b, h, q, kv: wide[q, q] == wide[kv, kv], None, None, N, N)
    (held,) = mask._made.witness.copies  # type: ignore[union-attr]
    assert held is not None
    assert held.numel() == N
    row.zero_()
    assert mask.graphs[0][0].num_edges == N * N


READERS: dict[str, Mod] = {
    "tolist": lambda b, h, q, kv: kv <= q.tolist(),
    "numpy": lambda b, h, q, kv: kv <= torch.as_tensor(q.numpy() + 1),
    "item": lambda b, h, q, kv: kv <= q.item(),
    "a branch": lambda b, h, q, kv: kv <= q if q > 3 else kv == q,
}


@pytest.mark.parametrize("name", READERS)
def test_functions_that_read_the_numbers_of_indices_are_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"mask_mod must be a function of \(b, h, q_idx, kv_idx\) that reads no numbers"
    ):
        flex.create_block_mask(READERS[name], None, None, N, N)
    mod = lambda s, b, h, q, kv: s + READERS[name](b, h, q, kv)  # noqa: E731
    with pytest.raises(
        ValueError, match=r"score_mod must be a function of \(score, b, h, q_idx, kv_idx\) that reads no"
    ):
        attend(mod)


# ---------------------------------------------------------------------------------------- torch's block masks


def pairs_of(mask: Any) -> Tensor:
    """The pairs of torch's block mask by its definition: [Q_LEN, KV_LEN] of its first entry and head."""
    num_dst, num_src = mask.shape[-2:]
    rows, columns = mask.BLOCK_SIZE
    q, kv = torch.arange(num_dst)[:, None], torch.arange(num_src)
    zero = torch.zeros((), dtype=torch.int64)
    found = torch.zeros(num_dst, num_src, dtype=torch.bool)
    lists = [(mask.kv_num_blocks, mask.kv_indices, mask.mask_mod(zero, zero, q, kv))]
    if mask.full_kv_num_blocks is not None:
        lists.append((mask.full_kv_num_blocks, mask.full_kv_indices, torch.ones((), dtype=torch.bool)))
    for count, indices, allowed in lists:
        for row in range(count.shape[-1]):
            for k in range(int(count[0, 0, row])):
                block = (q // rows == row) & (kv // columns == int(indices[0, 0, row, k]))
                found |= block & allowed
    return found


@pytest.mark.parametrize("size", [8, (8, 16), 7, 128])
@pytest.mark.parametrize("separate", [True, False])
def test_blocks_of_torch_stay_and_partial_ones_are_asked(size: Any, separate: bool) -> None:
    offset = torch.tensor(0)
    rule = lambda b, h, q, kv: kv <= q + offset  # noqa: E731
    mask = of_torch.create_block_mask(
        rule, None, None, N, N, device="cpu", BLOCK_SIZE=size, separate_full_blocks=separate
    )
    for number in (0, 1, 3, -2, 20, -20):
        offset.fill_(number)
        allowed = pairs_of(mask)
        found = masks.of_mask(mask, 1, HEADS, N, N)[0][0].dense()
        assert found.equal(allowed), number


def test_a_full_block_is_not_asked() -> None:
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    columns = torch.tensor([1, 0], dtype=torch.int32).view(1, 1, 2, 1).expand(1, 1, 2, 2).contiguous()
    mask = of_torch.BlockMask.from_kv_blocks(
        one * 0, columns * 0, one, columns, BLOCK_SIZE=1, mask_mod=lambda b, h, i, j: i >= j
    )
    assert masks.of_mask(mask, 1, HEADS, 2, 2)[0][0].dense().equal(torch.tensor([[False, True], [True, False]]))
    mask.full_kv_indices.copy_(torch.tensor([[[[0, 0], [1, 0]]]]))
    assert masks.of_mask(mask, 1, HEADS, 2, 2)[0][0].dense().equal(torch.eye(2).bool())
    mask.full_kv_num_blocks = mask.full_kv_indices = None
    assert masks.of_mask(mask, 1, HEADS, 2, 2)[0][0].num_edges == 0


def test_blocks_that_differ_by_entry_and_head_and_lists_with_rubbish() -> None:
    torch.manual_seed(0)
    table = torch.rand(2, HEADS, 5, 5) > 0.5
    counts = table.sum(-1).int()
    order = table.int().argsort(dim=-1, descending=True, stable=True).int()
    order[torch.arange(5) >= counts[..., None]] = 1 << 30  # what stands behind the number of blocks means nothing
    mask = of_torch.BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=8, mask_mod=CAUSAL, compute_q_blocks=False)
    found = masks.of_mask(mask, 2, HEADS, N, N)
    blocks = table.repeat_interleave(8, -1).repeat_interleave(8, -2)
    for b in range(2):
        for h in range(HEADS):
            assert found[b][h].dense().equal(blocks[b, h] & torch.ones(N, N).tril().bool())


def test_a_step_of_decoding_cuts_a_mask_as_gpt_fast_does() -> None:
    whole = of_torch.create_block_mask(CAUSAL, None, None, N, N, device="cpu", BLOCK_SIZE=8)
    offset = torch.tensor(0)
    query, key, value = features()
    full = attend(mask=whole)
    for step in (3, 20, 39):
        offset.fill_(step)
        mask = whole[:, :, torch.tensor([step // 8])]
        mask.mask_mod = lambda b, h, q, kv: CAUSAL(b, h, q + offset, kv)
        mask.seq_lengths = (1, N)
        found = flex.flex_attention(query[:, :, step : step + 1], key, value, block_mask=mask)
        torch.testing.assert_close(found[:, :, 0], full[:, :, step])


def test_too_few_blocks_are_refused() -> None:
    mask = of_torch.create_block_mask(CAUSAL, None, None, 16, 16, device="cpu", BLOCK_SIZE=8)
    mask.seq_lengths = (N, N)
    with pytest.raises(ValueError, match="2 x 2 blocks of 8 x 8 pairs, too few for 40 queries and 40 keys"):
        attend(mask=mask)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_masks_of_torch_are_those_of_its_compiled_kernel() -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch's kernel needs a compiler")
    count = 300
    offset = torch.tensor(0)
    rule = lambda b, h, q, kv: kv <= q + offset  # noqa: E731
    mask = of_torch.create_block_mask(rule, None, None, count, count, device="cpu")
    compiled = torch.compile(of_torch.flex_attention)
    for number in (0, 1, 100, -100):
        offset.fill_(number)
        torch.testing.assert_close(attend(mask=mask, count=count), compiled(*features(count), block_mask=mask))


# ---------------------------------------------------------------------------------------- copies and threads


def named_rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv <= q + OFFSET


def test_copies_of_masks() -> None:
    OFFSET.zero_()
    mask = flex.create_block_mask(named_rule, None, None, N, N)
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.graphs[0][0].num_edges == N * (N + 1) // 2
        assert attend(mask=other).equal(attend(mask=mask))


def test_masks_and_scores_in_threads() -> None:
    """First calls in eight threads: torch's own tracer would patch classes for all of them."""
    document = torch.arange(N) // 7
    rule = lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)  # noqa: E731
    mod = lambda s, b, h, q, kv: s + (q - kv)  # noqa: E731
    expected = attend(mod, flex.create_block_mask(rule, None, None, N, N))
    for _ in range(10):
        ours = flex.create_block_mask(rule, None, None, N, N)
        theirs = of_torch.create_block_mask(rule, None, None, N, N, device="cpu")
        start = threading.Barrier(8)
        found: list[Any] = [None] * 8

        def work(k: int, ours: Any = ours, theirs: Any = theirs, start: Any = start, found: Any = found) -> None:
            start.wait()
            try:
                found[k] = attend(mod, (ours, theirs, flex.create_block_mask(rule, None, None, N, N))[k % 3])
            except Exception as error:
                found[k] = error

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in found:
            assert not isinstance(result, Exception), result
            torch.testing.assert_close(result, expected)


def test_a_model_that_runs_in_another_thread_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a function is recorded, calls of modules are those of torch."""
    before = nn.Module.__call__, nn.Module.__getattr__
    seen = []
    flex.create_block_mask(
        lambda *at: (seen.append((nn.Module.__call__, nn.Module.__getattr__)), CAUSAL(*at))[1], None, None, N, N
    )
    assert set(seen) == {before}


def test_recording_is_quick() -> None:
    """Each call records the function, in 10 us an operation; torch's tracer takes milliseconds."""
    program = programs.record(CAUSAL)
    assert [str(node.target) for node in program.nodes if node.target] == ["aten.ge.Tensor"]
    assert program.captured == []
