"""Whether all processes compute the same thing: a hash of what each computes is compared."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mpnn.distributed.groups import all_gather
from mpnn.graph import Graph
from mpnn.graph.exchange import Layer
from mpnn.graph.runs import Runs


def gather(facts: str, group: dist.ProcessGroup, numbers: Sequence[int] = ()) -> list[list[int]]:
    """The numbers of every process, in the order of ranks.

    Raises:
        ValueError: on every process, unless all of them state the same facts.
    """
    hashes, *rest = all_gather(torch.tensor([crc32(facts.encode()), *numbers]), group).T.tolist()
    if len(set(hashes)) > 1:
        raise ValueError(
            f"the processes disagree. This one has {facts}; all must call the same layers in the same order, over the "
            "same whole graph, with the same weights (torch.manual_seed before the model is built, DDP or FSDP2) and "
            "features of the same dtype and batch size"
        )
    return [list(of_rank) for of_rank in zip(*rest, strict=True)]


_AGREED: "WeakKeyDictionary[nn.Module, set[str]]" = WeakKeyDictionary()
"""The groups in which all processes had the weights of a module."""


def weights(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every process unless all have the same weights; once for each module and group."""
    agreed = _AGREED.setdefault(module, set())
    if group.group_name not in agreed:
        total = sum(_sum_of_bits(x.detach()) for x in module.parameters() if not isinstance(x, DTensor))
        gather(f"the weights of {type(module).__name__}, whose bits add up to {total}", group)
        agreed.add(group.group_name)


def _sum_of_bits(x: Tensor) -> int:
    """The sum of the numbers' bits as integers: one pass over memory on any device, independent of its order."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.itemsize, torch.uint8)
    return int(x.contiguous().view(integers).sum(dtype=torch.int64)) if x.numel() and not x.is_meta else 0


def features(layer: Layer | None) -> str:
    """Describes the features of a layer, for `gather`."""
    return "features" if layer is None else f"{layer.dtype} features of batch {list(layer.batch)}"


def of_graph(graph: Graph) -> str:
    """A digest of the edges in their order, and of the attributes, types and positions stored with them."""
    sizes = torch.tensor([graph.num_dst, graph.num_src])
    edges = graph.ends if graph.is_explicit else graph.runs
    of_edges = graph.cached("digest", lambda: digest((sizes, edges)))
    # Attributes may be written to, so they are read in each call.
    data = *graph.edge_data.values(), graph.positions
    return of_edges + digest(data)


def digest(of: Any) -> str:
    """A digest of tensors and arrays, in tuples and runs."""
    sha = sha256()
    for array in _arrays(of):
        sha.update(f"{array.dtype} {list(array.shape)}".encode())
        sha.update(array.flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _arrays(of: Any) -> Iterator[Tensor]:
    if isinstance(of, Runs):
        of = tuple(getattr(of, field.name) for field in fields(of))
    if isinstance(of, tuple):
        for each in of:
            yield from _arrays(each)
    elif of is not None:
        yield torch.as_tensor(of).detach().cpu().contiguous()
