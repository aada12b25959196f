"""First calls in eight threads at once: over new graphs, topologies and layers. All threads get the same numbers."""

import sys
import threading
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn

from mpnn import MessagePassing, graphs, ops
from mpnn.attention import Additive, DotProduct
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Table
from mpnn.position import T5, ALiBi, Rotary
from mpnn.update import FeedForward, PostNorm

THREADS = 8


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns after nearly each instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """The results of jobs, each in a thread of its own, which begin at the same time."""
    start = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)

    def work(k: int, job: Callable[[], Any]) -> None:
        start.wait()
        try:
            results[k] = job()
        except Exception as error:
            results[k] = error

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def assert_same(results: list[Any]) -> None:
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


TOPOLOGIES = {
    "causal": graphs.causal,
    "window": lambda: graphs.window(3),
    "longformer": lambda: graphs.longformer(4, globals=2),
    "documents": lambda: graphs.causal() & graphs.documents([9, 3, 12]),
    "windows of an image": lambda: graphs.windows(4, 6, size=2),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sum": lambda: MessagePassing(None, "sum"),
    "std": lambda: MessagePassing(None, "std"),
    "rotary": lambda: MessagePassing(None, "sum", None, DotProduct(16, 2, position=Rotary(8))),
    "ALiBi and T5": lambda: MessagePassing(None, "sum", None, DotProduct(16, 2, position=[ALiBi(2), T5(2)])),
    "GAT": lambda: MessagePassing(None, "sum", None, Additive(16, 8, 2)),
    "a block": lambda: MessagePassing(None, "sum", PostNorm(16, FeedForward(16, 32)), DotProduct(16, 2)),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("recorded", [True, False])
def test_layers_over_a_new_graph(name: str, recorded: bool) -> None:
    x = torch.randn(24, 16)
    for number, make in enumerate([*LAYERS.values()] * 3):
        layer = make().eval()
        # A label makes a new topology, which no cache holds.
        topology = TOPOLOGIES[name]() | graphs.global_nodes([number])
        graph = topology.bind(24).alias()
        given = topology if number % 2 else graph

        def run(layer: nn.Module = layer, given: Any = given) -> torch.Tensor:
            with torch.set_grad_enabled(recorded):
                return layer(x, given).detach()

        assert_same(together(*[run] * THREADS))


def test_attention_along_new_edges() -> None:
    for _ in range(20):
        graph = graphs.from_edges(torch.randint(30, (2, 90)), 30)
        query = torch.randn(30, 2, 8)
        table = BiasTable(torch.randn(3, 2), Table(torch.arange(900).view(30, 30) % 3))
        assert_same(together(*[lambda g=graph, q=query, t=table: ops.attend(g, q, q, q, bias=t)] * THREADS))
        assert_same(together(*[lambda g=graph, q=query: ops.aggregate(g, q[:, 0], "mean")] * THREADS))


def test_first_calls_of_many_layers() -> None:
    """Each thread has a layer of its own, while many others live."""
    x = torch.randn(9, 64)
    held: list[nn.Module] = []
    for _ in range(20):
        layers = [
            MessagePassing(graphs.complete(), "sum", PostNorm(64, FeedForward(64, 128)), DotProduct(64, 2)).eval()
            for _ in range(THREADS)
        ]
        held += layers

        def run(layer: nn.Module) -> torch.Tensor:
            with torch.inference_mode():
                return layer(x)

        together(*[lambda layer=layer: run(layer) for layer in layers])


def test_all_threads_receive_one_value() -> None:
    """What a graph derives lives once, however many threads ask for it first."""

    def build() -> object:
        sleep(0.001)
        return object()

    for key in ("a name", ("a form", 1)):
        graph = graphs.causal().bind(5).alias()
        assert len(set(together(*[lambda g=graph, k=key: g.cached(k, build)] * THREADS))) == 1
    graph = graphs.from_edges(torch.randint(99, (2, 9999)), 99)
    assert len({id(rows) for rows in together(*[lambda: graph.csr] * THREADS)}) == 1
    topology = graphs.random(3, seed=7) | graphs.window(1)
    assert len({id(bound) for bound in together(*[lambda: topology.bind(300)] * THREADS)}) == 1
