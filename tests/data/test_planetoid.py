"""Cora and what is kept like it: files read by hand-written opcodes, pickles that are never run, damage that is named.

The pickles are Python 2's, written opcode by opcode: today's pickle module writes other names for the same things.
"""

import os
import pickle

import pytest
import torch
from planetoid_files import array, csr, name, neighbor_lists, program, sequence, text
from planetoid_files import small_planetoid as small_planetoid
from real_data import real

from mpnn.data.errors import DamagedFile, UnsafePickle
from mpnn.data.pickles import load_plain
from mpnn.data.planetoid import citeseer, cora, read_planetoid, row_normalize


def test_planetoid_by_hand(small_planetoid):
    data = read_planetoid(small_planetoid, "small")
    assert data.x.tolist() == [[1, 0], [0, 1], [1, 1], [0, 0], [0, 1], [1, 1]]
    assert data.y.tolist() == [0, 1, 0, 1, 1, 0]
    # The link 0-1 stands twice in the file and 0-0 once.
    assert data.edge_index.tolist() == [[1, 0, 5, 2], [0, 1, 2, 5]]
    assert data.train_mask.tolist() == [True, False, False, False, False, False]
    assert data.val_mask.tolist() == [False, True, True, True, False, False]
    assert data.test_mask.tolist() == [False, False, False, False, True, True]
    assert (data.num_nodes, data.num_classes) == (6, 2)
    assert (data.x.dtype, data.edge_index.dtype, data.y.dtype) == (torch.float32, torch.int64, torch.int64)


def test_nodes_that_the_split_leaves_out_have_no_features_and_no_mask(small_planetoid):
    lists = {0: [1], 1: [0], 2: [], 3: [], 4: [], 5: [], 6: [4]}
    (small_planetoid / "ind.small.graph").write_bytes(program(neighbor_lists(lists)))
    (small_planetoid / "ind.small.test.index").write_text("6\n4\n")
    data = read_planetoid(small_planetoid, "small")
    assert data.x.tolist() == [[1, 0], [0, 1], [1, 1], [0, 0], [0, 1], [0, 0], [1, 1]]
    assert data.y.tolist() == [0, 1, 0, 1, 1, 0, 0]
    assert data.test_mask.tolist() == [False] * 4 + [True, False, True]
    assert not (data.train_mask | data.val_mask)[5]


class Spiteful:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_calls_a_function_is_refused_and_not_run(small_planetoid, protocol):
    mark = small_planetoid / "was-here"
    attack = pickle.dumps(Spiteful(os.system, f"echo > {mark}"), protocol=protocol)
    (small_planetoid / "ind.small.graph").write_bytes(attack)
    with pytest.raises(UnsafePickle, match=rf"ind\.small\.graph: the pickle asks for {os.system.__module__}\.system"):
        read_planetoid(small_planetoid, "small")
    assert not mark.exists()
    pickle.loads(attack)
    assert mark.exists()  # so the attack was a real one


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("__builtin__", "eval"),
        ("builtins", "getattr"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "fromfile"),
        ("scipy.sparse.csr", "sys.exit"),
        ("collections", "OrderedDict"),
        ("mpnn.data.pickles", "pickle.loads"),
    ],
)
def test_every_name_but_the_six_is_refused(tmp_path, module, attribute):
    path = tmp_path / "file"
    path.write_bytes(program(name(module, attribute)))
    with pytest.raises(UnsafePickle, match=f"{module}.{attribute}"):
        load_plain(path)


def test_an_array_of_objects_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(program(name("numpy", "dtype") + sequence(b"t", text(b"O8")) + b"R"))
    with pytest.raises(UnsafePickle, match="dtype 'O8'; only plain numbers"):
        load_plain(path)


def test_a_sparse_matrix_with_columns_out_of_range_is_damaged(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(program(csr([[0], [10**6]], 2)))
    with pytest.raises(DamagedFile, match="truncated or not a Planetoid file"):
        load_plain(path)


@pytest.mark.parametrize("part", ["tx", "ally", "graph"])
def test_a_truncated_pickle_is_named_wherever_it_ends(small_planetoid, part):
    path = small_planetoid / f"ind.small.{part}"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFile, match=rf"ind\.small\.{part} is truncated") as caught:
            load_plain(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "content", "complaint"),
    [
        ("graph", program(neighbor_lists({i: [6] for i in range(6)})), "links 0 to 6, but the nodes are 0 to 5"),
        ("graph", program(neighbor_lists({0: [1]})), "lists the neighbors of 1 nodes, expected 6"),
        ("graph", program(array([[1]], "i4")), "does not hold a dictionary of neighbors"),
        ("ally", program(array([[1, 1]] * 4, "i4")), "does not hold one label a row"),
        ("tx", program(array([[1, 1]] * 2, "f4")), "does not hold a sparse matrix"),
        ("tx", program(csr([[0]], 2)), "4 . 1 rows of features for 4 . 2 labels"),
        ("test.index", b"4\n4\n", "does not list 2 different nodes from 4 on"),
        ("test.index", b"3\n4\n", "does not list 2 different nodes from 4 on"),
        ("test.index", b"4\n", "does not list 2 different nodes from 4 on"),
        ("test.index", b"4\n900000000000\n", "lists the neighbors of 6 nodes, expected 900000000001"),
        ("test.index", b"4\nfive\n", "not a list of node numbers"),
    ],
)
def test_files_that_do_not_fit_are_named(small_planetoid, part, content, complaint):
    (small_planetoid / f"ind.small.{part}").write_bytes(content)
    with pytest.raises(DamagedFile, match=complaint):
        read_planetoid(small_planetoid, "small")


def test_cora_is_the_cora_of_the_papers():
    data = real(cora)
    assert data.x.shape == (2708, 1433)
    assert data.num_classes == 7
    assert set(data.x.unique().tolist()) == {0.0, 1.0}
    src, dst = data.edge_index
    assert data.edge_index.shape == (2, 2 * 5278)
    edges = set(zip(src.tolist(), dst.tolist(), strict=True))
    assert len(edges) == 2 * 5278
    assert all((j, i) in edges and i != j for i, j in edges)
    assert (data.train_mask.sum(), data.val_mask.sum(), data.test_mask.sum()) == (140, 500, 1000)
    assert not (data.train_mask & data.val_mask | (data.train_mask | data.val_mask) & data.test_mask).any()
    assert data.y[data.train_mask].bincount().tolist() == [20] * 7
    # Linked papers mostly share their topic; with features and labels in a wrong order they would not.
    assert (data.y[src] == data.y[dst]).float().mean() > 0.8
    test_edges = data.test_mask[src] & data.test_mask[dst]
    assert (data.y[src] == data.y[dst])[test_edges].float().mean() > 0.8


def test_citeseer_is_that_of_the_papers():
    data = real(citeseer)
    assert (data.x.shape, data.num_classes, data.edge_index.shape) == ((3327, 3703), 6, (2, 2 * 4552))
    assert (data.train_mask.sum(), data.val_mask.sum(), data.test_mask.sum()) == (120, 500, 1000)
    src, dst = data.edge_index
    assert (data.y[src] == data.y[dst]).float().mean() > 0.7
    empty = data.x.sum(1) == 0
    assert empty.sum() == 15
    assert not (empty & (data.train_mask | data.val_mask | data.test_mask)).any()


def test_row_normalize_makes_rows_sum_to_one_and_leaves_empty_rows():
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    assert row_normalize(x).tolist() == [[0.25, 0.75], [0.0, 0.0]]
