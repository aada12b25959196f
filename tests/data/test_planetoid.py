"""Cora and what is kept like it: pickles are unpickled by digest, and names that plain data do not need are refused.

The pickles are Python 2's, written opcode by opcode: today's pickle module writes other names for the same things.
"""

import os
import pickle
from hashlib import sha256

import pytest
import torch
from planetoid_files import name, neighbor_lists, program, small_planetoid as small_planetoid, source
from real_data import real

from mpnn.data.errors import DamagedFile, DatasetNotFound
from mpnn.data.planetoid import citeseer, cora, load_plain, read_planetoid, row_normalize


def test_planetoid_by_hand(small_planetoid):
    data = read_planetoid(small_planetoid, source(small_planetoid))
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
    data = read_planetoid(small_planetoid, source(small_planetoid))
    assert data.x.tolist() == [[1, 0], [0, 1], [1, 1], [0, 0], [0, 1], [0, 0], [1, 1]]
    assert data.y.tolist() == [0, 1, 0, 1, 1, -1, 0]
    assert data.test_mask.tolist() == [False] * 4 + [True, False, True]
    assert not (data.train_mask | data.val_mask)[5]


class Spiteful:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_calls_a_function_is_refused_and_not_run(small_planetoid, protocol):
    mark, known = small_planetoid / "was-here", source(small_planetoid)
    attack = pickle.dumps(Spiteful(os.system, f"echo > {mark}"), protocol=protocol)
    (small_planetoid / "ind.small.graph").write_bytes(attack)
    with pytest.raises(DamagedFile, match=r"ind\.small\.graph has the SHA-256 \w+, expected"):
        read_planetoid(small_planetoid, known)
    with pytest.raises(pickle.UnpicklingError, match=f"asks for {os.system.__module__}.system"):
        read_planetoid(small_planetoid, source(small_planetoid))  # as if its digest were the known one
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
        ("mpnn.data.planetoid", "pickle.loads"),
    ],
)
def test_every_name_but_the_six_is_refused(tmp_path, module, attribute):
    path, content = tmp_path / "file", program(name(module, attribute))
    path.write_bytes(content)
    with pytest.raises(pickle.UnpicklingError, match=f"{module}.{attribute}"):
        load_plain(path, sha256(content).hexdigest())


@pytest.mark.parametrize("part", ["allx", "y", "graph", "test.index"])
def test_files_that_are_missing_or_changed_are_named(small_planetoid, part):
    path, known = small_planetoid / f"ind.small.{part}", source(small_planetoid)
    whole = path.read_bytes()
    for changed in (b"", whole[:-1], whole + b"\n", bytes([whole[0] ^ 1]) + whole[1:]):
        path.write_bytes(changed)
        with pytest.raises(DamagedFile, match=rf"ind\.small\.{part} has the SHA-256"):
            read_planetoid(small_planetoid, known)
    path.unlink()
    with pytest.raises(DatasetNotFound, match=rf"there is no .*ind\.small\.{part}"):
        read_planetoid(small_planetoid, known)
    path.mkdir()
    with pytest.raises(DamagedFile, match=rf"ind\.small\.{part} is not a file"):
        read_planetoid(small_planetoid, known)


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
    assert data.y[empty].eq(-1).all()
    assert not (empty & (data.train_mask | data.val_mask | data.test_mask)).any()


def test_row_normalize_makes_rows_sum_to_one_and_leaves_empty_rows():
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    assert row_normalize(x).tolist() == [[0.25, 0.75], [0.0, 0.0]]
