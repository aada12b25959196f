"""One process of a group: models of transformers in place generate over a divided cache, against one process.

    RANK=0 WORLD_SIZE=2 python -m hf_ranks_generate FILE FAMILY ...

FILE is where the processes of a group meet. Prints a line for each case; the exit code is 1 if one disagrees.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from hf_families import tiny

from mpnn import graphs, hf
from mpnn.distributed import partition, sharded

PROMPT, NEW, WINDOW = 23, 9, 6
SINGLE = 1e-6
CASES = [
    ("equal", None, {}),
    ("uneven", None, {}),
    ("zigzag", None, {"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.1}),
    ("uneven", "causal() & window(5)", {}),
    ("uneven", None, {"num_beams": 3}),
]


def division(name: str, ranks: int) -> Any:
    if name == "equal":
        return None
    causal = graphs.causal().bind(PROMPT)
    if name == "zigzag":
        return partition(causal, balance="zigzag")
    last_is_small = torch.tensor([0] * (PROMPT - 2 * ranks) + [r for r in range(ranks) for _ in range(2)])
    return partition(causal, parts=last_is_small, transport="halo")


def compare(family: str, owners_of: str, graph: str | None, options: dict[str, Any]) -> float:
    """The largest difference of the logits of all steps; raises AssertionError if tokens, or what is kept, differ."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = tiny(family).double().eval()
    model.set_experts_implementation("eager")  # which takes float64
    prompt = torch.randint(3, 60, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    handle = hf.use(model, graph)
    options = {
        "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "output_logits": True,
        "return_dict_in_generate": True, **options,
    }  # fmt: skip
    torch.manual_seed(7)
    expected = model.generate(prompt, **options)
    torch.manual_seed(7 + rank)  # the processes take the generator of the first
    part = division(owners_of, ranks)
    streams = part is None and family != "gpt_oss"  # whose sinks a stream refuses
    with sharded(part, transport="stream" if streams else "auto"):
        found = model.generate(prompt, **options)
        cache = found.past_key_values
        more = torch.tensor([[5, 9, 3], [8, 4, 7]]).repeat(len(cache.layers[0].keys) // len(prompt), 1)
        with torch.no_grad():
            continued = model(more, past_key_values=cache, use_cache=True).logits
    with torch.no_grad():
        reference = model(more, past_key_values=expected.past_key_values, use_cache=True).logits
    handle.restore()
    assert torch.equal(found.sequences, expected.sequences), f"{found.sequences} {expected.sequences}"
    first = [PROMPT // ranks] * ranks if part is None else part.dst.sizes
    total = PROMPT + NEW - 1 + more.shape[1]
    assert cache.get_seq_length() == total == sum(cache.counts)
    most = max(*first, -(-total // ranks) + more.shape[1])
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape
        kept = layer.keys.shape[2]
        window = getattr(layer, "sliding_window", None)
        assert kept == (cache.counts[rank] if window is None else min(cache.counts[rank], window - 1))
        assert kept <= most, (kept, most)
    steps = [(a - b).abs().max() for a, b in zip(found.logits, expected.logits, strict=True)]
    assert len(steps) == NEW
    return float(torch.stack([*steps, (continued - reference).abs().max()]).max())


def main() -> None:
    meeting, *families = sys.argv[1:]
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    failed = False
    for family in families:
        for case in CASES if family == "llama" else CASES[:3]:
            try:
                error = compare(family, *case)
            except Exception:
                traceback.print_exc()
                print(f"FAILED {family} {case}", flush=True)
                os._exit(1)  # the others would wait
            wrong = not error <= SINGLE
            failed |= wrong
            print(f"{'WRONG ' if wrong else ''}{error:.1e} {family} {case}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
