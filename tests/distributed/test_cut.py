"""Graphs that are cut on the disk: parts against `partition` in memory, damage, and kill -9. Training over them is in
tests/support/distributed_cases.py:check_cut."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mpnn import graphs
from mpnn.distributed import Part, disk, partition

ROOT = Path(__file__).parents[2]
N, RANKS = 60, 3


@pytest.fixture
def edges():
    return np.random.default_rng(0).integers(0, N, (2, 400))


@pytest.fixture
def whole(tmp_path, edges):
    return graphs.write_csr(tmp_path / "csr", edges, N)


def test_parts_are_those_of_a_partition(tmp_path, whole, edges, monkeypatch):
    monkeypatch.setattr(disk, "_CHUNK", 7)  # so that rows are read in many pieces
    owners = np.random.default_rng(1).integers(0, RANKS, N)
    x = np.arange(2.0 * N).reshape(N, 2)
    fetched = disk.cut(whole, tmp_path / "parts", owners, RANKS, data={"x": x})
    expected = partition(whole.graph(), RANKS, parts=torch.from_numpy(owners))
    assert fetched == [plan.fetches for plan in expected.plans()]
    every = []
    for rank in range(RANKS):
        part = Part.open(tmp_path / "parts", rank)
        assert torch.equal(part.nodes, torch.from_numpy(np.flatnonzero(owners == rank)))
        assert np.array_equal(part.data["x"], x[owners == rank])
        assert all(map(torch.equal, part.graph.node_positions(), (part.nodes, part.sources))), "for relative positions"
        assert part.fetched == np.bincount(owners[part.sources[len(part.nodes) :]], minlength=RANKS).tolist()
        src, dst = part.graph.stored_edges.long()
        assert bool((dst.diff() >= 0).all())
        every.append(torch.stack([part.sources[src], part.nodes[dst]]))
    assert sorted(map(tuple, torch.cat(every, 1).T.tolist())) == sorted(map(tuple, edges.T.tolist()))


def test_data_of_edges_go_with_them(tmp_path, edges, monkeypatch):
    monkeypatch.setattr(disk, "_CHUNK", 7)
    whole = graphs.write_csr(tmp_path / "csr", edges, N, edge_ids=True)
    draw = np.random.default_rng(1)
    data = {"edge_attr": draw.random((400, 3)), "edge_type": draw.integers(0, 5, 400), "x": np.arange(60.0)}
    disk.cut(whole, tmp_path / "parts", draw.integers(0, RANKS, N), RANKS, data=data)
    found = []
    for rank in range(RANKS):
        part = Part.open(tmp_path / "parts", rank)
        assert part.data.keys() == {"x"}
        src, dst = part.sources[part.graph.edge_index[0]], part.nodes[part.graph.edge_index[1]]
        rows = torch.column_stack([src, dst, part.graph.edge_type, part.graph.edge_attr])
        found += map(tuple, rows.tolist())
    expected = np.column_stack([*edges, data["edge_type"], data["edge_attr"]])
    assert sorted(found) == sorted(map(tuple, expected.tolist()))


def test_data_of_edges_that_do_not_fit_are_refused(tmp_path, whole, edges):
    owners, types = np.arange(N) % RANKS, np.zeros(400, np.int64)
    with pytest.raises(ValueError, match=r"edge_type is in the order of the edges .* write it with edge_ids"):
        disk.cut(whole, tmp_path / "parts", owners, RANKS, data={"edge_type": types})
    numbered = graphs.write_csr(tmp_path / "numbered", edges, N, edge_ids=True)
    with pytest.raises(
        ValueError, match="a row for each of the 400 edges, under its own name; got 'edge_attr' with 60"
    ):
        disk.cut(numbered, tmp_path / "parts", owners, RANKS, data={"edge_attr": np.zeros((60, 2))})
    for wrong in (types.astype(np.int32), types[:, None]):
        with pytest.raises(ValueError, match=r"edge_type must be int64 \[400\]; got int"):
            disk.cut(numbered, tmp_path / "parts", owners, RANKS, data={"edge_type": wrong})
    disk.cut(numbered, tmp_path / "parts", owners, RANKS, data={"edge_type": types})
    with pytest.raises(ValueError, match="holds another cut"):
        disk.cut(numbered, tmp_path / "parts", owners, RANKS, data={"edge_type": types + 1})


def test_a_rank_may_have_no_nodes(tmp_path, whole):
    disk.cut(whole, tmp_path / "parts", np.zeros(N, np.int64), 2)
    assert Part.open(tmp_path / "parts", 1).graph.num_edges == 0
    assert Part.open(tmp_path / "parts", 0).fetched == [0, 0]


def test_ldg_cuts_less_than_chance_and_is_even(tmp_path):
    order = np.random.default_rng(0).permutation(3600)
    for name, numbers, bound in (("shuffled", order, 0.6), ("in order", np.arange(3600), 0.1)):
        mesh = numbers[graphs.grid(60, 60).bind(3600).edge_index.numpy()]
        owners = disk.ldg(graphs.write_csr(tmp_path / name, mesh, 3600), 4)
        assert np.bincount(owners).max() < 1.08 * 900
        assert (owners[mesh[0]] != owners[mesh[1]]).mean() < bound * 3 / 4  # 3/4 by chance


def test_owners_are_read_as_metis_writes_them(tmp_path):
    (tmp_path / "papers.part.3").write_text("0\n2\n1\n2\n")
    assert disk.read_owners(tmp_path / "papers.part.3").tolist() == [0, 2, 1, 2]


def test_what_does_not_fit_is_refused(tmp_path, whole):
    folder, owners = tmp_path / "parts", np.arange(N) % RANKS
    for wrong in (owners[1:], owners * 1.0, owners - 1, owners + 1):
        with pytest.raises(ValueError, match="owners must hold the rank of each of the 60 nodes, below 3"):
            disk.cut(whole, folder, wrong, RANKS)
    with pytest.raises(ValueError, match="a row for each of the 60 nodes, under its own name; got 'nodes' with 60"):
        disk.cut(whole, folder, owners, RANKS, data={"nodes": owners})
    with pytest.raises(FileNotFoundError, match="holds no cut"):
        Part.open(folder, 0)
    disk.cut(whole, folder, owners, RANKS)
    disk.cut(whole, folder, owners, RANKS)  # again: the same
    with pytest.raises(ValueError, match="holds another cut"):
        disk.cut(whole, folder, owners[::-1], RANKS)
    disk.cut(whole, tmp_path / "with data", owners, RANKS, data={"x": np.zeros((N, 2))})
    for x in (np.ones((N, 2)), np.zeros((N, 2), np.float32)):
        with pytest.raises(ValueError, match="holds another cut"):
            disk.cut(whole, tmp_path / "with data", owners, RANKS, data={"x": x})
    with pytest.raises(ValueError, match="ranks 0 to 2; got 3"):
        Part.open(folder, 3)
    with pytest.raises(RuntimeError, match="no process group"):
        Part.open(folder)
    damaged = np.load(folder / "rank-1" / "edges.npy", mmap_mode="r+")
    damaged[0, 3] = 1000
    damaged.flush()
    with pytest.raises(IndexError, match=r"edge 3 .* has source 1000"):
        Part.open(folder, 1)
    (folder / "leaving-2.npy").unlink()
    with pytest.raises(ValueError, match="was not completed; the same command continues it"):
        Part.open(folder, 0)


KILLED = """
import sys, numpy as np
from mpnn import graphs
from mpnn.distributed import disk
write, written = disk._write_part, []
def slow(folder, *arguments):
    write(folder, *arguments)
    written.append(folder)
    if len(written) == 2:
        print("second part", flush=True)
        import time; time.sleep(60)
disk._write_part = slow
disk.cut(graphs.open_csr(sys.argv[1]), sys.argv[2], np.arange(60) % 3, 3)
"""


@pytest.mark.slow
def test_a_killed_cut_continues(tmp_path, whole):
    command = [sys.executable, "-c", KILLED, tmp_path / "csr", tmp_path / "parts"]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / "parts" / "rank-0").exists()
    before = (tmp_path / "parts" / "rank-0" / "edges.npy").stat().st_mtime_ns
    time.sleep(0.01)
    disk.cut(whole, tmp_path / "parts", np.arange(N) % RANKS, RANKS)
    assert (tmp_path / "parts" / "rank-0" / "edges.npy").stat().st_mtime_ns == before
    assert not list((tmp_path / "parts").glob(".*"))
    assert sum(Part.open(tmp_path / "parts", rank).graph.num_edges for rank in range(RANKS)) == whole.num_edges
