"""The data room: files are found, fetched whole or not at all, and read without running any of them.

Tests on real data read `$MPNN_DATA` (or the cache) and are skipped with the sentence a user would get;
no test reaches the network.
"""

import gzip
import hashlib
import importlib
import io
import os
import pickle
import struct
import sys
from http.client import RemoteDisconnected

import numpy as np
import pytest
import torch

from mpnn.data import sources
from mpnn.data.digits import digits
from mpnn.data.errors import DamagedFile, DatasetNotFound, UnsafePickle
from mpnn.data.locate import cache_dir, download, locate
from mpnn.data.pickles import load_plain
from mpnn.data.planetoid import cora, read_planetoid, row_normalize
from mpnn.data.sentences import sentences
from mpnn.data.sources import SOURCES, RemoteFile, Source
from mpnn.data.text import (
    Characters,
    batches,
    multi30k,
    pydoc_topics,
    read_gzip_lines,
    tinyshakespeare,
    topics,
)
from mpnn.data.tu import read_tu, tu

# The package re-exports a function of the module's own name, which hides the module from `import ... as`.
locate_module = importlib.import_module("mpnn.data.locate")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(url):
        raise OSError("the tests use no network")

    monkeypatch.setattr(locate_module, "_open", refuse)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without any dataset: an empty cache, and no MPNN_DATA."""
    monkeypatch.setenv("MPNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MPNN_DATA", raising=False)
    return tmp_path


def real(load, *args):
    try:
        return load(*args)
    except DatasetNotFound as error:
        pytest.skip(str(error))


# --- finding and fetching -------------------------------------------------------------------------------

CONTENT = b"one small public file\n"


def small_source(url, content=CONTENT):
    file = RemoteFile("small.txt", url, len(content), hashlib.sha256(content).hexdigest())
    return Source("small", "a/small", (file,), "https://example.org", "download small.txt", "MIT", "nobody")


@pytest.fixture
def published(machine, monkeypatch):
    """A dataset `small` whose source is a file on this disk."""
    origin = machine / "origin.txt"
    origin.write_bytes(CONTENT)
    monkeypatch.setitem(SOURCES, "small", small_source(origin.as_uri()))
    monkeypatch.setattr(locate_module, "_open", lambda url: origin.open("rb"))
    return origin


def files_under(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_missing_file_is_downloaded_once_into_the_cache(machine, published):
    folder = locate("small")
    assert folder == machine / "cache" / "a" / "small"
    assert (folder / "small.txt").read_bytes() == CONTENT
    published.unlink()
    assert locate("small", "small.txt") == folder


def test_download_reads_a_url(machine, monkeypatch):
    monkeypatch.undo()
    origin = machine / "origin.txt"
    origin.write_bytes(CONTENT)
    (file,) = small_source(origin.as_uri()).files
    download(file, machine / "new" / "folder" / "small.txt")
    assert files_under(machine / "new") == ["small.txt"]


def test_mpnn_data_is_looked_at_first(machine, published, monkeypatch):
    mine = machine / "mine" / "a" / "small"
    mine.mkdir(parents=True)
    (mine / "small.txt").write_bytes(CONTENT)
    monkeypatch.setenv("MPNN_DATA", str(machine / "mine"))
    assert locate("small") == mine
    assert not (machine / "cache").exists()


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (CONTENT.replace(b"one", b"two"), "SHA-256"),
        (CONTENT[:-5], f"sent {len(CONTENT) - 5} bytes where {len(CONTENT)} were expected"),
        (CONTENT + b"more", "more than"),
    ],
    ids=["other content", "too short", "too long"],
)
def test_a_download_that_is_not_the_file_leaves_nothing(machine, published, sent, complaint):
    published.write_bytes(sent)
    with pytest.raises(DatasetNotFound, match=complaint):
        locate("small")
    assert files_under(machine / "cache") == []


class BreakingConnection(io.BytesIO):
    """Sends ten bytes, then the given exception."""

    def __init__(self, exception):
        super().__init__(CONTENT)
        self.exception = exception

    def read(self, size=-1):
        if self.tell():
            raise self.exception
        return super().read(10)


@pytest.mark.parametrize("exception", [TimeoutError("timed out"), RemoteDisconnected("gone")])
def test_a_broken_connection_leaves_nothing(machine, published, monkeypatch, exception):
    monkeypatch.setattr(locate_module, "_open", lambda url: BreakingConnection(exception))
    with pytest.raises(DatasetNotFound, match=str(exception)):
        locate("small")
    assert files_under(machine / "cache") == []


def test_an_interrupted_download_leaves_nothing(machine, published, monkeypatch):
    monkeypatch.setattr(locate_module, "_open", lambda url: BreakingConnection(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        locate("small")
    assert files_under(machine / "cache") == []


def test_the_file_appears_only_when_it_is_whole(machine, published, monkeypatch):
    seen = []

    class Watched(io.BytesIO):
        def read(self, size=-1):
            seen.append((machine / "cache" / "a" / "small" / "small.txt").exists())
            return super().read(4)

    monkeypatch.setattr(locate_module, "_open", lambda url: Watched(CONTENT))
    locate("small")
    assert seen
    assert not any(seen)


def test_a_truncated_file_in_place_is_named(machine, published):
    (locate("small") / "small.txt").write_bytes(CONTENT[:7])
    with pytest.raises(DamagedFile, match=r"small\.txt has 7 bytes where 22 are expected"):
        locate("small")


def test_not_found_says_in_one_sentence_how_to_get_it(machine):
    with pytest.raises(DatasetNotFound) as caught:
        cora()
    sentence = str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    for part in (
        "cora",
        "ind.cora.graph",
        "MPNN_DATA",
        "planetoid/cora/raw",
        "github.com/kimiyoung/planetoid",
    ):
        assert part in sentence
    assert "\n" not in sentence


def test_a_dataset_to_be_unpacked_by_hand_says_so(machine):
    with pytest.raises(DatasetNotFound, match=r"unpack dataset/MUTAG/MUTAG\.txt from dataset\.zip"):
        tu("MUTAG")


def test_a_cache_that_cannot_be_written_is_a_sentence_too(machine, published, monkeypatch):
    (machine / "file").write_text("not a folder")
    monkeypatch.setenv("MPNN_CACHE", str(machine / "file"))
    with pytest.raises(DatasetNotFound, match="to get it"):
        locate("small")


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match=r"no dataset 'coar'.*cora, multi30k, tinyshakespeare"):
        locate("coar")
    with pytest.raises(ValueError, match=r"cora has no file .ind\.cora\.z.; it has ind\.cora\.x"):
        locate("cora", "ind.cora.z")
    with pytest.raises(ValueError, match=r"'ENZYMES'.*MUTAG and PROTEINS"):
        tu("ENZYMES")
    with pytest.raises(ValueError, match=r"'test'.*test_2016_flickr"):
        multi30k("test")


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"MPNN_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/mpnn"),
        ("linux", {}, "/home/me/.cache/mpnn"),
        ("darwin", {}, "/home/me/Library/Caches/mpnn"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/mpnn/Cache"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch, platform, environment, expected):
    for name in ("MPNN_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(locate_module.Path, "home", lambda: locate_module.Path("/home/me"))
    assert cache_dir().as_posix() == expected


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_source_is_complete(source):
    assert source.licence
    assert source.cite
    assert source.how
    assert source.homepage.startswith("https://")
    for file in source.files:
        if file.url is not None:
            assert file.url.startswith("https://")
            assert file.url.endswith("/" + file.name)
            assert file.size > 0
            assert len(bytes.fromhex(file.sha256)) == 32


@pytest.mark.parametrize("source", [sources.CORA, sources.TINYSHAKESPEARE, sources.MULTI30K], ids=lambda s: s.name)
def test_the_checksums_are_those_of_the_real_files(source):
    folder = real(locate, source.name)
    for file in source.files:
        assert hashlib.sha256((folder / file.name).read_bytes()).hexdigest() == file.sha256


# --- pickles --------------------------------------------------------------------------------------------
# Python 2 pickles, written opcode by opcode: today's pickle module writes other names for the same things.


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def number(value):
    return b"J" + struct.pack("<i", value)


def text(value):
    return b"U" + bytes([len(value)]) + value


def sequence(opcode, *items):
    return b"(" + b"".join(items) + opcode


def array(values, code):
    values = np.asarray(values, np.dtype(code))
    dtype = name("numpy", "dtype") + sequence(b"t", text(code.encode()), number(0), number(1)) + b"R"
    dtype += sequence(b"t", number(3), text(b"<"), b"NNN", number(-1), number(-1), number(0)) + b"b"
    empty = name("numpy.core.multiarray", "_reconstruct")
    empty += sequence(b"t", name("numpy", "ndarray"), sequence(b"t", number(0)), text(b"b")) + b"R"
    shape = sequence(b"t", *map(number, values.shape))
    raw = b"T" + struct.pack("<i", values.nbytes) + values.tobytes()
    return empty + sequence(b"t", number(1), shape, dtype, b"I00\n", raw) + b"b"


def csr(rows, columns):
    indices = [j for row in rows for j in row]
    indptr = np.cumsum([0] + [len(row) for row in rows])
    state = (
        (b"_shape", sequence(b"t", number(len(rows)), number(columns))),
        (b"data", array(np.ones(len(indices)), "f4")),
        (b"indices", array(indices, "i4")),
        (b"indptr", array(indptr, "i4")),
    )
    items = b"".join(text(key) + value for key, value in state)
    return name("scipy.sparse.csr", "csr_matrix") + b")\x81}" + sequence(b"u", items) + b"b"


def neighbour_lists(lists):
    start = name("collections", "defaultdict") + sequence(b"t", name("__builtin__", "list")) + b"R"
    items = b"".join(number(i) + sequence(b"l", *map(number, others)) for i, others in lists.items())
    return start + sequence(b"u", items)


def program(body):
    return b"\x80\x02" + body + b"."


@pytest.fixture
def small_planetoid(tmp_path):
    """Six nodes, two words, two classes: one for training, nodes 4 and 5 for testing, listed as 5, 4."""
    files = {
        "x": csr([[0]], 2),
        "y": array([[1, 0]], "i4"),
        "allx": csr([[0], [1], [0, 1], []], 2),
        "ally": array([[1, 0], [0, 1], [1, 0], [0, 1]], "i4"),
        "tx": csr([[0, 1], [1]], 2),
        "ty": array([[1, 0], [0, 1]], "i4"),
        "graph": neighbour_lists({0: [1, 1, 0], 1: [0, 0], 2: [5], 3: [], 4: [], 5: [2]}),
    }
    for part, body in files.items():
        (tmp_path / f"ind.small.{part}").write_bytes(program(body))
    (tmp_path / "ind.small.test.index").write_text("5\n4\n")
    return tmp_path


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
        ("graph", program(neighbour_lists({0: [6]})), "links 0 to 6, but the nodes are 0 to 5"),
        ("graph", program(array([[1]], "i4")), "does not hold a dictionary of neighbours"),
        ("ally", program(array([[1, 1]] * 4, "i4")), "does not hold one label a row"),
        ("tx", program(array([[1, 1]] * 2, "f4")), "does not hold a sparse matrix"),
        ("tx", program(csr([[0]], 2)), "4 . 1 rows of features for 4 . 2 labels"),
        ("test.index", b"4\n4\n", "does not list each of the nodes 4 to 5 once"),
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


def test_row_normalize_makes_rows_sum_to_one_and_leaves_empty_rows():
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    assert row_normalize(x).tolist() == [[0.25, 0.75], [0.0, 0.0]]


# --- graph collections ----------------------------------------------------------------------------------

TWO_GRAPHS = "2\n3 1\n5 2 1 2\n7 1 0\n5 1 0\n2 -1\n7 0\n7 0\n"


def write(path, content):
    path.write_text(content)
    return path


def test_tu_by_hand(tmp_path):
    data = read_tu(write(tmp_path / "two.txt", TWO_GRAPHS))
    star, pair = data.graphs
    assert star.edge_index.tolist() == [[1, 2, 0, 0], [0, 0, 1, 2]]
    assert (star.tags.tolist(), star.label, star.num_nodes) == ([0, 1, 0], 1, 3)
    assert pair.edge_index.shape == (2, 0)
    assert pair.edge_index.dtype == torch.int64
    assert (pair.tags.tolist(), pair.label) == ([1, 1], 0)
    assert (data.num_tags, data.num_classes) == (2, 2)


@pytest.mark.parametrize(
    ("content", "line", "complaint"),
    [
        ("", 1, "the file ends where the number of graphs should follow"),
        ("two\n", 1, "expected the number of graphs in whole numbers, found 'two'"),
        ("1\n3\n", 2, 'expected "n label" in whole numbers'),
        ("1\n0 1\n", 2, "a graph of 0 nodes"),
        ("1\n2 1\n0 1 1\n", 4, "the file ends"),
        ("1\n2 1\n0 2 1\n0 1 0\n", 3, "node 0 announces 2 neighbours and lists 1"),
        ("1\n2 1\n0 1 1\n0 1 2\n", 4, "node 1 has the neighbour 2, but its graph has 2 nodes"),
        ("1\n2 1\n0 1 1\n0 1 0.5\n", 4, "found '0 1 0.5'"),
        ("1\n1 1\n0 0\n1 1\n", 4, "expected the end of the file"),
        ("1\n1 1\n0 \u00e9\n", 3, "in whole numbers"),
    ],
)
def test_an_odd_tu_file_is_named_with_its_line(tmp_path, content, line, complaint):
    path = tmp_path / "odd.txt"
    path.write_bytes(content.encode("utf-8"))
    with pytest.raises(DamagedFile) as caught:
        read_tu(path)
    assert f"odd.txt, line {line}: " in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("missing", range(1, 8))
def test_a_truncated_tu_file_is_refused(tmp_path, missing):
    lines = TWO_GRAPHS.splitlines(keepends=True)
    with pytest.raises(DamagedFile, match=f"line {len(lines) - missing + 1}: the file ends"):
        read_tu(write(tmp_path / "cut.txt", "".join(lines[:-missing])))


@pytest.mark.parametrize(
    ("collection", "graphs", "nodes", "tags", "positive"),
    [("MUTAG", 188, 3371, 7, 125), ("PROTEINS", 1113, 43471, 3, 450)],
)
def test_the_real_collections(collection, graphs, nodes, tags, positive):
    data = real(tu, collection)
    assert (len(data.graphs), data.num_classes) == (graphs, 2)
    assert sum(graph.num_nodes for graph in data.graphs) == nodes
    assert sum(graph.label for graph in data.graphs) == positive
    # Without the first graph, which is damaged in a copy of MUTAG in circulation.
    assert torch.cat([graph.tags for graph in data.graphs[1:]]).unique().numel() == tags
    for graph in data.graphs:
        src, dst = graph.edge_index.tolist()
        assert set(zip(src, dst, strict=True)) == set(zip(dst, src, strict=True))
        assert not graph.edge_index.numel() or graph.edge_index.max() < graph.num_nodes


# --- text -----------------------------------------------------------------------------------------------


def test_tinyshakespeare():
    play = real(tinyshakespeare)
    assert play.startswith("First Citizen:\nBefore we proceed any further")
    assert (len(play), len(Characters(play))) == (1115394, 65)


@pytest.mark.parametrize(("split", "pairs"), [("train", 29000), ("val", 1014), ("test_2016_flickr", 1000)])
def test_multi30k(split, pairs):
    captions = real(multi30k, split)
    assert len(captions) == pairs
    assert all(english.strip() and german.strip() for english, german in captions)


def test_multi30k_pairs_belong_together():
    assert real(multi30k, "train")[0] == (
        "Two young, White males are outside near many bushes.",
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    )


def test_gzip_lines(tmp_path):
    path = tmp_path / "lines.gz"
    # U+2028 ends a line for str.splitlines, but it is part of a caption.
    path.write_bytes(gzip.compress("ein\u2028Satz\nzwei\n".encode()))
    assert read_gzip_lines(path) == ["ein\u2028Satz", "zwei"]


def test_a_damaged_gzip_file_is_named(tmp_path):
    path = tmp_path / "lines.gz"
    whole = gzip.compress(b"a sentence\n" * 100)
    for content in (whole[:-4], whole[: len(whole) // 2], b"no gzip", gzip.compress(b"\xff\xfe")):
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match=r"lines\.gz is"):
            read_gzip_lines(path)


def test_the_manual_is_english_in_a_fixed_order_without_repeated_paragraphs():
    manual = pydoc_topics()
    assert manual == pydoc_topics()
    assert list(topics()) == sorted(topics())
    assert len(manual) > 300_000
    assert manual.count(" the ") > 2000
    paragraphs = manual.rstrip("\n").split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))


def test_a_python_without_its_manual_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DatasetNotFound, match="installed without its manual"):
        pydoc_topics()


def test_characters_by_hand():
    vocabulary = Characters("hello")
    assert vocabulary.symbols == "ehlo"
    indices = vocabulary.encode("hole")
    assert indices.dtype == torch.int64
    assert indices.tolist() == [1, 3, 2, 0]
    assert vocabulary.decode(indices) == "hole"
    assert vocabulary.encode("").shape == (0,)
    assert vocabulary.decode(vocabulary.encode("")) == ""


def test_characters_round_trip_on_the_manual():
    manual = pydoc_topics()
    vocabulary = Characters(manual)
    assert vocabulary.decode(vocabulary.encode(manual)) == manual


def test_what_is_not_in_the_vocabulary_is_named():
    vocabulary = Characters("abc")
    with pytest.raises(ValueError, match="'ß' at position 2 is not among the 3"):
        vocabulary.encode("abß")
    with pytest.raises(ValueError, match="index 3 at position 1 is outside this vocabulary of 3"):
        vocabulary.decode(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="index -1 at position 0"):
        vocabulary.decode(torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"got \[1, 2\]; decode row by row"):
        vocabulary.decode(torch.tensor([[0, 1]]))


def test_batches_are_crops_and_their_next_characters():
    data = torch.arange(100)
    x, y = batches(data, length=7, batch=50, generator=torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (50, 7)
    assert (y == x + 1).all()
    assert (x[:, 1:] == y[:, :-1]).all()
    again, _ = batches(data, 7, 50, torch.Generator().manual_seed(0))
    assert (x == again).all()


def test_batches_reach_both_ends_of_the_data():
    x, y = batches(torch.arange(5), length=3, batch=64, generator=torch.Generator().manual_seed(0))
    assert set(x[:, 0].tolist()) == {0, 1}
    assert y.max() == 4


def test_batches_refuse_what_they_cannot_crop():
    with pytest.raises(ValueError, match="crops of 5 characters need at least 6 of them, got 5"):
        batches(torch.arange(5), 5, 1)
    with pytest.raises(ValueError, match=r"shape \[characters\], got \[1, 5\]"):
        batches(torch.arange(5)[None], 2, 1)
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        batches(torch.arange(5), 0, 1)


def test_sentences_are_sentences():
    found = sentences()
    assert found == sentences()
    assert len(found) == len(set(found)) == 400
    for sentence in found:
        assert 5 <= len(sentence.split()) <= 40
        assert sentence[0].isupper()
        assert "\n" not in sentence
        assert "::=" not in sentence
        assert ">>>" not in sentence


def test_fewer_sentences_are_spread_over_the_whole_manual():
    everything = sentences(10**6)
    few = sentences(4)
    assert few == [everything[i * len(everything) // 4] for i in range(4)]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        sentences(0)


# --- digits ---------------------------------------------------------------------------------------------


def test_digits():
    pytest.importorskip("sklearn")
    data = digits()
    assert data.x.shape == (1797, 64)
    assert data.x.dtype == torch.float32
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert data.y.dtype == torch.int64
    assert data.num_classes == 10
    assert (data.train_mask.int() + data.val_mask.int() + data.test_mask.int() == 1).all()
    assert data.y[data.train_mask].bincount().tolist() == [20] * 10
    assert (data.val_mask.sum(), data.test_mask.sum()) == (400, 1197)
    # Every figure measured on the digits depends on the split: it must not drift between versions.
    assert data.train_mask.nonzero().flatten()[:8].tolist() == [6, 14, 18, 34, 37, 47, 53, 54]


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "mpnn\[cli\]"'):
        digits()
