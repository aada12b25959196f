"""Each public function that takes numbers, called with one number replaced by an odd one, in a process with a limit.

`python odd_numbers.py [NAME...]` prints what each call ended with. `test_odd_numbers.py` asserts that none hangs,
crashes, fills memory, or fails without naming the argument.
"""

import os
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mpnn import data, flex, graphs, ops
from mpnn.decoding.cache import KVCache
from mpnn.graph.relations import GridOffset, Offset
from mpnn.graphs import encodings

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 2]])
GRAPH = graphs.from_edges(EDGES, 6)
X = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
Q = X.view(6, 1, 2)


def bound(builder: Callable[..., Any], num_dst: int = 6, num_src: int | None = None, /, **arguments: Any) -> Any:
    return builder(**arguments).bind(num_dst, num_src).edge_index


def first_batches(**arguments: Any) -> Any:
    return list(islice(data.neighbor_batches(GRAPH, torch.arange(6), **arguments), 2))


class Case(NamedTuple):
    call: Callable[..., Any]
    arguments: dict[str, Any]


def topology(name: str, num_dst: int = 6, num_src: int | None = None, **arguments: Any) -> Case:
    def call(**arguments: Any) -> Any:
        return bound(getattr(graphs, name), num_dst, num_src, **arguments)

    return Case(call, arguments)


CASES: dict[str, Case] = {
    "window": topology("window", radius=1, dilation=1),
    "strided": topology("strided", stride=2),
    "fixed": topology("fixed", block=2, summary=1),
    "global_nodes": topology("global_nodes", count_or_indices=1),
    "global_nodes, listed": Case(lambda node: bound(graphs.global_nodes, count_or_indices=[node]), {"node": 1}),
    "prefix": topology("prefix", k=2),
    "memory": topology("memory", 6, 8, length=2),
    "documents": Case(lambda length: bound(graphs.documents, lengths=[length, 4]), {"length": 2}),
    "permutation": Case(lambda node: bound(graphs.permutation, 3, order=[0, node, 2]), {"node": 1}),
    "random": topology("random", degree=2, block=1, seed=0),
    "expander": topology("expander", degree=2, seed=0),
    "longformer": topology("longformer", window=2, globals=1),
    "bigbird": topology("bigbird", block=1, window=3, random=1, globals=1, seed=0),
    "grid": topology("grid", height=2, width=3, connectivity=4),
    "neighborhood": topology("neighborhood", height=2, width=3, radius=1),
    "convolution": topology("convolution", 2, 6, height=2, width=3, kernel=2, stride=1, padding=0, dilation=1),
    "pooling": topology("pooling", 2, 6, height=2, width=3, size=2),
    "windows": topology("windows", height=2, width=3, size=2, shift=0),
    "bind": Case(
        lambda num_dst, num_src: graphs.complete().bind(num_dst, num_src).edge_index, {"num_dst": 6, "num_src": 6}
    ),
    "bind a window": Case(lambda n: graphs.window(2).bind(n).num_edges, {"n": 6}),
    "bind random": Case(lambda n: graphs.random(2).bind(n).num_edges, {"n": 6}),
    "bind expander": Case(lambda n: graphs.expander(2).bind(n).num_edges, {"n": 6}),
    "bind strided": Case(lambda n: graphs.strided(3).bind(n).num_edges, {"n": 6}),
    "bind a permutation": Case(lambda n: (~graphs.causal() | graphs.window(1)).bind(n).num_edges, {"n": 6}),
    "from_edges": Case(lambda num_nodes: graphs.from_edges(EDGES, num_nodes).csr, {"num_nodes": 6}),
    "from_edges of two sets": Case(
        lambda num_src, num_dst: graphs.from_edges(EDGES, num_src=num_src, num_dst=num_dst).csr,
        {"num_src": 6, "num_dst": 6},
    ),
    "from_edges, an end": Case(lambda end: graphs.from_edges([[0, end], [1, 0]]).csr, {"end": 1}),
    "from_blocks": Case(
        lambda size, num_blocks: graphs.from_blocks([[0, 1], [1, 0]], size, num_blocks).csr,
        {"size": 2, "num_blocks": 2},
    ),
    "chosen": Case(lambda num_src: graphs.chosen(torch.tensor([[0, 1]]), num_src).edge_index, {"num_src": 6}),
    "blocks": Case(
        lambda size, num_src, num_dst: graphs.blocks(torch.ones(3, 3).bool(), size, num_src, num_dst=num_dst).num_edges,
        {"size": 2, "num_src": 6, "num_dst": 6},
    ),
    "lsh": Case(
        lambda buckets, rounds, seed: graphs.lsh(X, buckets, rounds, seed).num_edges,
        {"buckets": 2, "rounds": 1, "seed": 0},
    ),
    "knn": Case(lambda k: graphs.knn(X, k), {"k": 2}),
    "knn of labels": Case(lambda k: graphs.knn(X, k, torch.zeros(6).long()), {"k": 2}),
    "chunks": Case(
        lambda size, num_nodes, before, after: (
            graphs.chunks(torch.arange(6)[None], size, num_nodes, before=before, after=after).num_edges
        ),
        {"size": 2, "num_nodes": 6, "before": 1, "after": 0},
    ),
    "radius": Case(lambda r: graphs.radius(X, r), {"r": 1.0}),
    "radius, periodic": Case(lambda r: graphs.radius(X, r, cell=torch.eye(2)), {"r": 0.3}),
    "farthest": Case(lambda n: graphs.farthest(X, n), {"n": 2}),
    "icosphere": Case(lambda level: graphs.icosphere(level), {"level": 1}),
    "icosphere_points": Case(lambda level: graphs.icosphere_points(level), {"level": 1}),
    "random_walk_neighbors": Case(
        lambda k, walks, length, seed: graphs.random_walk_neighbors(GRAPH, k, walks, length, seed),
        {"k": 2, "walks": 3, "length": 2, "seed": 0},
    ),
    "absent_edges": Case(lambda count: graphs.absent_edges(GRAPH, count), {"count": 3}),
    "absent_edges of a large graph": Case(
        lambda count: graphs.absent_edges(graphs.from_edges(EDGES, 1000), count), {"count": 3}
    ),
    "rollouts": Case(lambda prompt, answer: graphs.rollouts(prompt, [answer, 1]).num_edges, {"prompt": 2, "answer": 2}),
    "tree": Case(lambda parent: graphs.tree([-1, parent]).num_edges, {"parent": 0}),
    "sample": Case(
        lambda fanout, seed: graphs.compressed(GRAPH).sample(torch.tensor([0, 2]), fanout, seed),
        {"fanout": 2, "seed": 0},
    ),
    "in_neighbors": Case(lambda node: graphs.compressed(GRAPH).in_neighbors(node), {"node": 1}),
    "power": Case(lambda k: GRAPH.power(k).num_edges, {"k": 2}),
    "power of a topology": Case(lambda k: graphs.window(1).bind(6).power(k).num_edges, {"k": 2}),
    "reach": Case(lambda layers: GRAPH.reach(layers), {"layers": 2}),
    "rows": Case(lambda start, stop: GRAPH.rows(start, stop).num_edges, {"start": 1, "stop": 3}),
    "drop_edges": Case(lambda p: GRAPH.drop_edges(p).num_edges, {"p": 0.5}),
    "with_self_loops": Case(lambda fill: GRAPH.with_self_loops(fill).num_edges, {"fill": 1.0}),
    "Offset": Case(lambda clip: graphs.window(1).with_relation(Offset(clip)).bind(6).types, {"clip": 2}),
    "GridOffset": Case(
        lambda width, rows, columns: graphs.window(1).with_relation(GridOffset(width, rows, columns)).bind(6).types,
        {"width": 3, "rows": 1, "columns": 1},
    ),
    "degrees": Case(lambda most: encodings.degrees(GRAPH, most), {"most": 3}),
    "laplacian": Case(lambda k: encodings.laplacian(GRAPH.undirected(), k), {"k": 2}),
    "pagerank": Case(lambda alpha: encodings.pagerank(GRAPH, alpha), {"alpha": 0.15}),
    "path_edges": Case(lambda steps: encodings.path_edges(GRAPH, steps), {"steps": 2}),
    "random_features": Case(
        lambda num_nodes, k, seed: encodings.random_features(num_nodes, k, seed), {"num_nodes": 6, "k": 2, "seed": 0}
    ),
    "random_walk": Case(lambda steps: encodings.random_walk(GRAPH, steps), {"steps": 2}),
    "shortest_paths": Case(lambda max_distance: encodings.shortest_paths(GRAPH, max_distance), {"max_distance": 2}),
    "weisfeiler_lehman": Case(lambda rounds: encodings.weisfeiler_lehman(GRAPH, rounds), {"rounds": 2}),
    "TimeEncoding": Case(lambda dim: encodings.TimeEncoding(dim)(X[:, 0]), {"dim": 4}),
    "split_links": Case(
        lambda val, test, seed: data.split_links(GRAPH, val, test, seed=seed), {"val": 0.2, "test": 0.2, "seed": 0}
    ),
    "neighbor_batches": Case(first_batches, {"fanouts": [2], "batch_size": 2, "seed": 0}),
    "neighbor_batches, a fanout": Case(lambda fanout: first_batches(fanouts=[fanout], batch_size=2), {"fanout": 2}),
    "batches": Case(lambda length, batch: data.batches(torch.arange(40), length, batch), {"length": 3, "batch": 2}),
    "sentences": Case(lambda limit: len(data.sentences(limit)), {"limit": 2}),
    "attend": Case(
        lambda scale, softcap, dropout: ops.attend(GRAPH, Q, Q, Q, scale=scale, softcap=softcap, dropout=dropout),
        {"scale": 0.5, "softcap": 2.0, "dropout": 0.1},
    ),
    "flex": Case(lambda scale: flex.flex_attention(*[X[None, None]] * 3, scale=scale), {"scale": 0.5}),
    "create_block_mask": Case(
        lambda B, H, Q_LEN, KV_LEN: flex.create_block_mask(lambda b, h, i, j: i >= j, B, H, Q_LEN, KV_LEN),
        {"B": 1, "H": 1, "Q_LEN": 4, "KV_LEN": 4},
    ),
    "KVCache": Case(lambda length: KVCache(length), {"length": 4}),
    "KVCache.crop": Case(lambda count: KVCache(4).crop(count), {"count": 0}),
    "the limit of the cache": Case(lambda limit: setattr(graphs.cache, "limit", limit), {"limit": 1 << 30}),
}

LARGE = [10**9, 2**31, 99999999998, 2**40, 2**61, 2**63, 10**30]
WRONG: list[Any] = [-1, 0, True, float("nan"), float("inf"), 1e9, 2.5, "x", None, [1], b"1", -(2**63)]
NUMPY: list[Any] = [np.int64(2), np.int8(-3), np.uint64(2**63), np.float64(0.5), np.array(2), torch.tensor(2.5)]
VALUES = [*LARGE, *WRONG, *NUMPY]
SECONDS, BYTES = 5.0, 1 << 30  # of a call, as the processor counts them; and of memory beside the imports


def outcome(case: Case, argument: str, value: Any) -> tuple[str, str]:
    """("result", ""), or the error and where it was raised: "mpnn" for a check of this library."""
    try:
        case.call(**{**case.arguments, argument: value})
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        where = "mpnn" if f"{os.sep}mpnn{os.sep}" in last else last
        return f"{type(error).__name__} of {where}", str(error).replace("\n", " ")
    return "result", ""


def outcomes(name: str) -> list[list[str]]:
    """[argument, value, kind, text] of all calls of a case, in one forked process with limits of time and memory. A
    call without kind and text is the one that ended the process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os.close(read)
            warnings.simplefilter("ignore")
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + BYTES,) * 2)
            for argument in CASES[name].arguments:
                for value in VALUES:
                    signal.setitimer(signal.ITIMER_PROF, SECONDS)
                    os.write(write, f"\0{argument}\t{value!r}".encode())
                    os.write(write, "\t".join(["", *outcome(CASES[name], argument, value)])[:1000].encode())
        os._exit(0)
    os.close(write)
    found = b""
    while piece := os.read(read, 1 << 16):
        found += piece
    os.close(read)
    os.waitpid(child, 0)
    return [line.split("\t") for line in found.decode(errors="replace").split("\0")[1:]]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or CASES:
        for line in outcomes(name):
            print(name, *line, sep="\t", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
