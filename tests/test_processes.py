"""Processes and threads: forks, workers, many threads at once, Ctrl-C, and many steps.

Each script runs in its own process, because it forks, receives signals or is measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMMON = """
import gc, os, sys, threading
import torch
from mpnn import MessagePassing, graphs, ops
from mpnn.attention import DotProduct
from mpnn.graph.relations import Table
from mpnn.graph.edge_tables import BiasTable
from mpnn.update import FeedForward, PreNorm

def results(seed=0):
    \"\"\"Forward and backward through every kernel that shares its work among threads, and through torch's own.\"\"\"
    torch.manual_seed(seed)
    edges = torch.randint(0, 600, (2, 20_000))
    some, order = graphs.from_edges(edges, 600), graphs.causal().bind(600)
    x = torch.randn(600, 4, 16, requires_grad=True)
    # its backend is named, because a plan depends on the number of threads, of which a worker has one
    layer = MessagePassing(graphs.window(3), "sum", PreNorm(64, FeedForward(64)), DotProduct(64, 4), backend="tiles")
    out = [
        ops.attend(some, x, x, x, backend="csr", dropout=0.1),
        ops.attend(order, x, x, x, backend="tiles"),
        ops.attend(order, x, x, x, backend="dense"),
        ops.aggregate(some, x.flatten(1), "max", backend="csr"),
        layer(x.flatten(1)),
    ]
    sum(y.square().sum() for y in out).backward()
    return [y.detach() for y in out] + [x.grad]

def same(a, b):
    return all(x.equal(y) for x, y in zip(a, b, strict=True))
"""


# From 3.12 on, Python warns of every fork of a process that has threads; torch's alone are enough for that.
# A process may have threads, and a machine one core: neither is what these tests are about.
WARNINGS = (
    "-W",
    "error",
    "-W",
    "ignore:This process:DeprecationWarning",
    "-W",
    "ignore:This DataLoader will create:UserWarning",
)


def start(script: str | Path, *arguments: str, threads: int = 2, **more: str) -> subprocess.Popen[str]:
    """A file, or lines after those of `COMMON`, in a process of its own, in which warnings are errors."""
    code = (str(script),) if isinstance(script, Path) else ("-c", COMMON + script)
    return subprocess.Popen(
        [sys.executable, *WARNINGS, *code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), **more},
    )


def output(process: subprocess.Popen[str]) -> str:
    """What it printed, once it has ended well. The limit of each test ends the wait for one that hangs."""
    with process:
        try:
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, err
    return out


# ------------------------------------------------------------------------------------------------------- forks, workers

FORKED = """
before = results()  # starts this process's threads, torch's and the kernels'
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # as DataLoader does: GNU OpenMP, which is torch's, cannot use threads after a fork
        alone = same(results(), before)
        torch.get_num_threads = lambda: 2  # the kernels' own threads can be started anew
        os._exit(0 if alone and same(results(), before) else 1)
    children.append(child)
assert same(results(), before)  # while they run
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert same(results(), before)
"""


@pytest.mark.slow
def test_a_process_forks_after_its_kernels_ran_on_threads() -> None:
    """Which a child's kernels do, too, with threads of its own."""
    output(start(FORKED))


WORKERS = """
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, seed):
        graph = graphs.from_edges(torch.arange(10).view(2, 5), 10, edge_attr=torch.full((5, 1), float(seed)))
        return graph, results(seed)

if __name__ == "__main__":
    kind = sys.argv[1]
    expected = [results(seed) for seed in range(2)]
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=None, num_workers=2, multiprocessing_context=kind, persistent_workers=True
    )
    for _ in range(2):
        for seed, (graph, found) in enumerate(loader):
            assert same(found, expected[seed])
            assert graph.edge_attr.eq(seed).all() and graph.degree().tolist() == [0] * 5 + [1] * 5
"""


@pytest.mark.parametrize("kind", ["fork", "spawn"])
@pytest.mark.slow
def test_workers_give_what_their_parent_gives(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "workers.py"  # a file, because spawned workers import it
    script.write_text(COMMON + WORKERS)
    output(start(script, kind))


# ------------------------------------------------------------------------------------------------------------- threads

THREADS = """
from mpnn import models
errors = []

def at_once(run, count=8):
    \"\"\"What `run()` gives in many threads that begin together.\"\"\"
    gate, found = threading.Barrier(count), [None] * count

    def work(k):
        gate.wait()
        try:
            found[k] = run()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    assert not errors, errors
    return found

def layer():
    torch.manual_seed(0)
    return MessagePassing(graphs.causal() & graphs.window(9), "sum", None, DotProduct(32, 4)).eval()

sys.setswitchinterval(1e-5)  # threads take turns in the middle of everything
for attempt in range(3):
    n, op = 50 + attempt, layer()
    x = torch.randn(2, n, 32)
    edges = torch.randint(0, n, (2, 4 * n))
    fresh = graphs.from_edges(edges, n, edge_type=torch.randint(0, 3, (4 * n,)))
    gcn = models.GCN(32, 5).eval()

    def run():
        y = x.clone().requires_grad_()
        out = op(y)  # binds its topology for this length, which is not in the cache
        more = [ops.aggregate(fresh, y, kind) for kind in ("sum", "max", "std")]
        more += [gcn(y, fresh), fresh.reverse().degree(), fresh.runs.degree(), fresh.csc.col]
        out.square().sum().backward()
        return [out.detach(), y.grad, *(torch.as_tensor(z).detach() for z in more)]

    found = at_once(run)
    alone = run()
    assert all(same(one, alone) for one in found)
"""


def test_many_threads_share_a_layer_and_a_graph() -> None:
    """They find, or make, the same bound graph and all that is derived from it."""
    output(start(THREADS))


# -------------------------------------------------------------------------------------------------------------- Ctrl-C

INTERRUPTED = """
import signal
from mpnn.kernels.cpu import threads
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs behind it
results()  # threads started
n = 15_000
graph = graphs.random(16, seed=1).bind(n)
x = torch.randn(n, 1, 64, requires_grad=True)
out = ops.attend(graph, x, x, x, backend="csr")
calls = {
    "forward": lambda: ops.attend(graph, x, x, x, backend="csr"),
    "backward": lambda: out.sum().backward(retain_graph=True),
    "aggregate": lambda: ops.aggregate(graph, x.detach().flatten(1), "max", backend="csr"),
}
call = calls[sys.argv[1]]
call()  # derives what it needs of the graph
print("ready", flush=True)
while True:
    try:
        while True:
            call()
    except KeyboardInterrupt:
        break
assert same(results(), results())
assert threads.each(range(50), lambda k: k) == list(range(50))
"""


@pytest.mark.parametrize("call", ["backward", "forward", "aggregate"])
@pytest.mark.slow
def test_an_interrupt_ends_a_kernel_and_leaves_a_usable_process(call: str) -> None:
    process = start(INTERRUPTED, call)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output(process)


# ---------------------------------------------------------------------------------------------------------- many steps

STEPS = """
page, steps = os.sysconf("SC_PAGE_SIZE"), int(sys.argv[1])
random = torch.Generator().manual_seed(0)
kept, kept_rows = graphs.from_edges(torch.randint(0, 32, (2, 100)), 32), graphs.longformer(4, globals=1).bind(32)
layer = MessagePassing(graphs.causal() & graphs.window(4), "sum", None, DotProduct(16, 2, dropout=0.1))

def held():
    \"\"\"Objects of Python, and bytes of the process.\"\"\"
    for _ in range(4):  # a collection no longer counts a tuple of numbers, the next one a tuple of such tuples
        gc.collect()
    return len(gc.get_objects()), int(open("/proc/self/statm").read().split()[1]) * page

def step(k):
    n = 8 + k % 30
    fresh = graphs.from_edges(torch.randint(0, n, (2, 3 * n), generator=random), n)
    x = torch.randn(n, 2, 8, requires_grad=True)
    y = torch.randn(32, 2, 8, requires_grad=True)
    out = [
        ops.attend(fresh, x, x, x, dropout=(0.0, 0.1)[k % 2]),
        ops.aggregate(fresh, x.flatten(1), ("sum", "mean", "max", "std", "softmax")[k % 5]),
        ops.attend((kept, kept_rows)[k % 2], y, y, y, dropout=(0.0, 0.1, 0.5)[k % 3]),
        ops.attend(kept, y, y, y, bias=BiasTable(torch.randn(3, 2), Table(torch.randint(0, 3, (32, 32))))),
        ops.aggregate(kept.drop_edges(0.3), y.flatten(1)),
        ops.aggregate(kept.with_self_loops(), y.flatten(1)),
        ops.aggregate(graphs.batch([fresh, kept]), torch.cat([x, y]).flatten(1), "mean"),
        layer(x.flatten(1)),
    ]
    sum(z.square().sum() for z in out).backward()

for k in range(300 if steps < 1000 else 1000):  # until the caches, which are bounded, hold all that they will hold
    step(k)
objects, size = held()
for k in range(steps):
    step(k)
more_objects, more_size = held()
print((more_objects - objects) / steps, (more_size - size) / steps)
"""


def grown(steps: int) -> tuple[float, float]:
    """How many objects and bytes the process grows by in each of so many steps, once it has warmed up."""
    objects, size = map(float, output(start(STEPS, str(steps), threads=1)).split())
    return objects, size


@pytest.mark.slow
def test_a_round_of_steps_leaves_no_object_behind() -> None:
    objects, _ = grown(300)  # bounded caches may hold a plan more or less at the end: eight objects
    assert objects < 0.1


@pytest.mark.slow
def test_thousands_of_steps_do_not_grow() -> None:
    objects, size = grown(4_000)
    assert objects < 0.01
    assert size < 1000  # bytes a step, less than a graph takes: the allocator's own slack
