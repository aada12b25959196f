"""Sources of the public datasets: addresses, sizes, checksums, licenses.

This file contains only data; `locate.py` has the code that downloads them. Addresses are pinned to a commit, and sizes
and checksums are those of the files at this commit.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """One file of a dataset: its name in the dataset's folder, address, size and checksum.

    Args:
        name: file name relative to the dataset's folder.
        url: download address; None if the user has to unpack the file by hand.
        size: bytes; None if it is not known.
        sha256: checksum in hexadecimal; None if it is not known.
    """

    name: str
    url: str | None = None
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Source:
    """One dataset.

    Args:
        name: the name for `locate` and `mpnn data get`.
        folder: its folder under `$MPNN_DATA` and under the cache.
        files: all of its files.
        how: instructions, as the second half of the sentence "to get it, ...".
        license: license or terms of use, as the source states them.
        cite: the paper to cite.
        installed: where a package of the operating system puts the files; None if there is no such package.
    """

    name: str
    folder: str
    files: tuple[RemoteFile, ...]
    how: str
    license: str
    cite: str
    installed: str | None = None


def _pinned(base: str, *facts: tuple[str, int, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, base + name, size, sha256) for name, size, sha256 in facts)


_PLANETOID = "https://raw.githubusercontent.com/kimiyoung/planetoid/af6abf468a772cc055bec88c52e4d6f51b7c37e3/data/"


def _planetoid(name: str, *facts: tuple[str, int, str]) -> Source:
    return Source(
        name=name,
        folder=f"planetoid/{name}/raw",
        files=_pinned(_PLANETOID, *facts),
        how=f"download the ind.{name}.* files from the folder data of https://github.com/kimiyoung/planetoid",
        license="MIT",
        cite="Yang, Cohen, Salakhutdinov: Revisiting Semi-Supervised Learning with Graph Embeddings, ICML 2016",
    )


CORA = _planetoid(
    "cora",
    ("ind.cora.x", 22119, "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab"),
    ("ind.cora.tx", 148025, "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a"),
    ("ind.cora.allx", 257305, "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543"),
    ("ind.cora.y", 4054, "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1"),
    ("ind.cora.ty", 28135, "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad"),
    ("ind.cora.ally", 47959, "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71"),
    ("ind.cora.graph", 59847, "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d"),
    ("ind.cora.test.index", 5000, "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875"),
)

CITESEER = _planetoid(
    "citeseer",
    ("ind.citeseer.x", 31087, "d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6"),
    ("ind.citeseer.tx", 260321, "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21"),
    ("ind.citeseer.allx", 595021, "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668"),
    ("ind.citeseer.y", 3014, "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924"),
    ("ind.citeseer.ty", 24135, "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce"),
    ("ind.citeseer.ally", 55623, "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95"),
    ("ind.citeseer.graph", 61987, "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7"),
    ("ind.citeseer.test.index", 5000, "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4"),
)

TINYSHAKESPEARE = Source(
    name="tinyshakespeare",
    folder="tinyshakespeare",
    files=_pinned(
        "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
        "/data/tinyshakespeare/",
        ("input.txt", 1115394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    ),
    how="download data/tinyshakespeare/input.txt from https://github.com/karpathy/char-rnn",
    license="MIT; the text itself is in the public domain",
    cite="Karpathy: char-rnn, 2015",
)

MULTI30K = Source(
    name="multi30k",
    folder="multi30k",
    files=_pinned(
        "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw/",
        ("train.en.gz", 568929, "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
        ("train.de.gz", 637044, "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
        ("val.en.gz", 21650, "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
        ("val.de.gz", 24681, "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
        ("test_2016_flickr.en.gz", 21077, "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"),
        ("test_2016_flickr.de.gz", 22890, "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"),
    ),
    how="download the .en.gz and .de.gz files from data/task1/raw of https://github.com/multi30k/dataset",
    license="non-commercial research and education, after the Flickr terms of use",
    cite="Elliott, Frank, Sima'an, Specia: Multi30K: Multilingual English-German Image Descriptions, 2016",
)


def _tu(name: str, size: int, sha256: str) -> Source:
    home = "https://github.com/weihua916/powerful-gnns"
    return Source(
        name=name,
        folder=f"tu/{name}",
        files=(RemoteFile(f"{name}.txt", None, size, sha256),),
        how=f"unpack dataset/{name}/{name}.txt from dataset.zip of {home}",
        license="MIT (the text format's repository); TU Dortmund graph kernel benchmarks",
        cite="Xu, Hu, Leskovec, Jegelka: How Powerful are Graph Neural Networks?, ICLR 2019",
    )


TSP = Source(
    name="tsp",
    folder="tsp",
    files=(RemoteFile("attention_model_tsp20.safetensors"),),
    how="save the tensors of pretrained/tsp_20/epoch-99.pt of "
    "https://github.com/wouterkool/attention-learn-to-route with safetensors as attention_model_tsp20.safetensors",
    license="MIT",
    cite="Kool, van Hoof, Welling: Attention, Learn to Solve Routing Problems!, ICLR 2019",
)

FASHION_MNIST = Source(
    name="fashion-mnist",
    folder="fashion-mnist",
    files=tuple(
        RemoteFile(f"{part}-{kind}-ubyte.gz") for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    ),
    how="install Debian's package dataset-fashion-mnist, or download the four files from the folder data/fashion of "
    "https://github.com/zalandoresearch/fashion-mnist",
    license="MIT",
    cite="Xiao, Rasul, Vollgraf: Fashion-MNIST: a Novel Image Dataset, 2017",
    installed="/usr/share/datasets/fashion-mnist",
)

MUTAG = _tu("MUTAG", 32367, "05395684e2167e0fb31fc57534b5847cdf867ee5348d58497b33b46178c0294d")
PROTEINS = _tu("PROTEINS", 642021, "ed0730f9bf9da68aa6a8c80f2f2b6ecea5d05791ca254c709f3efab3b45d937b")

SOURCES: dict[str, Source] = {
    source.name: source for source in (CORA, CITESEER, TINYSHAKESPEARE, MULTI30K, TSP, FASHION_MNIST, MUTAG, PROTEINS)
}
"""Every dataset that is stored in files, by name."""
