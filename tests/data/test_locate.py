"""Finding a dataset's files: in place, in the cache, or fetched whole or not at all; and saying how to get them."""

import hashlib
import io
import re
from dataclasses import replace
from http.client import RemoteDisconnected

import pytest
from real_data import locate_module, real

from mpnn.data import sources
from mpnn.data.errors import DamagedFile, DatasetNotFound
from mpnn.data.locate import download, locate, search_folders
from mpnn.data.planetoid import cora
from mpnn.data.sources import SOURCES, RemoteFile, Source
from mpnn.data.text import multi30k
from mpnn.data.tu import tu


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without any dataset: an empty cache, and no MPNN_DATA."""
    monkeypatch.setenv("MPNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MPNN_DATA", raising=False)
    return tmp_path


CONTENT = b"one small public file\n"


def small_source(url, content=CONTENT):
    file = RemoteFile("small.txt", url, len(content), hashlib.sha256(content).hexdigest())
    return Source("small", "a/small", (file,), "download small.txt", "MIT", "nobody")


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
        (CONTENT[:-5], f"sent {len(CONTENT) - 5} bytes, expected {len(CONTENT)}"),
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


@pytest.mark.parametrize("exception", [TimeoutError("timed out"), RemoteDisconnected("gone"), KeyboardInterrupt("^C")])
def test_a_broken_connection_leaves_nothing(machine, published, monkeypatch, exception):
    monkeypatch.setattr(locate_module, "_open", lambda url: BreakingConnection(exception))
    with pytest.raises((DatasetNotFound, KeyboardInterrupt), match=re.escape(str(exception))):
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
    with pytest.raises(DamagedFile, match=r"small\.txt has 7 bytes, expected 22"):
        locate("small")


def test_not_found_says_in_one_sentence_how_to_get_it(machine):
    with pytest.raises(DatasetNotFound) as caught:
        cora()
    sentence = str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    for part in ("cora", "ind.cora.graph", "MPNN_DATA", "planetoid/cora/raw", "github.com/kimiyoung/planetoid"):
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
    with pytest.raises(ValueError, match=r"no dataset 'coar'.*cora, fashion-mnist, .*multi30k, tinyshakespeare"):
        locate("coar")
    with pytest.raises(ValueError, match=r"cora has no file .ind\.cora\.z.; it has ind\.cora\.x"):
        locate("cora", "ind.cora.z")
    with pytest.raises(ValueError, match=r"'ENZYMES'.*MUTAG and PROTEINS"):
        tu("ENZYMES")
    with pytest.raises(ValueError, match=r"'test'.*test_2016_flickr"):
        multi30k("test")


def test_without_a_home_folder_data_are_searched_where_the_environment_says(monkeypatch, tmp_path):
    def home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("MPNN_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(locate_module.Path, "home", home)
    monkeypatch.setenv("MPNN_DATA", str(tmp_path))
    assert search_folders() == [tmp_path]
    monkeypatch.delenv("MPNN_DATA")
    with pytest.raises(FileNotFoundError, match="Name a folder for caches in the environment variable MPNN_CACHE"):
        search_folders()


def test_a_package_of_python_that_has_the_files(machine, published, monkeypatch):
    """It is found without being imported."""
    folder = machine / "site" / "small_package" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError")
    (folder / "small.txt").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(machine / "site"))
    monkeypatch.setitem(SOURCES, "small", replace(SOURCES["small"], package="small_package/data"))
    assert locate("small") == folder
    monkeypatch.setitem(SOURCES, "small", replace(SOURCES["small"], package="no_such_package/data"))
    assert locate("small") == machine / "cache" / "a" / "small"


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_source_is_complete(source):
    assert source.license
    assert source.cite
    assert source.how
    for file in source.files:
        if file.url is not None:
            assert file.url.startswith("https://")
            assert file.url.endswith("/" + file.name)
            assert file.size > 0
            assert len(bytes.fromhex(file.sha256)) == 32


@pytest.mark.parametrize(
    "source", [sources.SOURCES[name] for name in ("cora", "tinyshakespeare", "multi30k")], ids=lambda s: s.name
)
def test_the_checksums_are_those_of_the_real_files(source):
    folder = real(locate, source.name)
    for file in source.files:
        assert hashlib.sha256((folder / file.name).read_bytes()).hexdigest() == file.sha256
