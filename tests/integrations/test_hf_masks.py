"""The masks of transformers as graphs, against the booleans that transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from mpnn.integrations.hf import closures, masks

KNOWN: dict[str, Any] = {
    "causal": hf.masking_utils.causal_mask_function,
    "bidirectional": hf.masking_utils.bidirectional_mask_function,
    "window": hf.masking_utils.sliding_window_causal_mask_function(4),
    "window both ways": hf.masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": hf.masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "prefix": hf.masking_utils.or_masks(
        hf.masking_utils.causal_mask_function,
        hf.masking_utils.blockwise_overlay(torch.tensor([[0] * 5 + [-1] * 7, [-1] * 2 + [3] * 4 + [-1] * 4 + [1] * 2])),
    ),
    "own function": lambda b, h, q, k: (q + k + b) % 3 != 0,
    "own function, with others": hf.masking_utils.and_masks(
        hf.masking_utils.causal_mask_function, lambda b, h, q, k: (q * k + b) % 3 != 0
    ),
}


@pytest.mark.parametrize("sizes", [(12, 12, 0, 0), (3, 12, 9, 0), (1, 8, 11, 4), (4, 9, 7, 3)], ids=str)
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.covering(times=2)
def test_masks_are_those_of_transformers(name: str, sizes: tuple[int, ...], padded: bool) -> None:
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[1, :3] = not padded
    arguments = dict(
        zip(("batch_size", "q_length", "kv_length", "q_offset", "kv_offset"), (2, *sizes), strict=True),
        mask_function=KNOWN[name], attention_mask=padding,
    )  # fmt: skip
    expected = hf.masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    graph, is_flat = masks.mask(**arguments).graph(None, 2, sizes[1], torch.device("cpu"))
    found = graph.dense()
    if is_flat:
        found = found.view(2, sizes[0], 2, sizes[1])[[0, 1], :, [0, 1]]
    assert found.expand(2, -1, -1).equal(expected)


def test_known_masks_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(*_: Any, **__: Any) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr(closures.Described, "_evaluated", evaluate)
    n = 100_000
    for name in ("causal", "bidirectional", "window", "window both ways", "chunks"):
        graph, _ = masks.mask(1, n, n, mask_function=KNOWN[name]).graph(None, 1, n, torch.device("cpu"))
        assert len(graph.runs.start) == n


def wider_than_its_name(sliding_window: int) -> Callable[..., Any]:
    """A window as a later version of transformers might define it."""

    def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= q_idx - sliding_window

    inner_mask.__module__ = hf.masking_utils.__name__
    inner_mask.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
    return inner_mask


def test_a_function_that_does_not_do_what_its_name_says_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closures, "_AGREES", {})
    changed = hf.masking_utils.and_masks(wider_than_its_name(4), hf.masking_utils.causal_mask_function)
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 12, "kv_length": 12, "mask_function": changed}
    expected = hf.masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    graph, _ = masks.mask(**arguments).graph(None, 1, 12, torch.device("cpu"))
    assert graph.dense().equal(expected[0, 0])
    assert {closures._form(changed): False} == closures._AGREES
