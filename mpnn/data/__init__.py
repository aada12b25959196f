"""Real data to run on: each loader finds its files, checks them, and returns plain tensors or text.

| loader | what |
|---|---|
| `cora()` | citation graph, nodes to classify |
| `tu("MUTAG")`, `tu("PROTEINS")` | small graphs to classify |
| `digits()` | points to classify (scikit-learn) |
| `tinyshakespeare()`, `pydoc_topics()` | text, read character by character |
| `multi30k(split)` | English-German sentence pairs |
| `sentences()` | sentences to search in |
"""

from mpnn.data.digits import PointClassification, digits
from mpnn.data.errors import DamagedFile, DatasetNotFound, UnsafePickle
from mpnn.data.locate import cache_dir, locate
from mpnn.data.planetoid import NodeClassification, cora, row_normalize
from mpnn.data.sentences import sentences
from mpnn.data.sources import SOURCES, RemoteFile, Source
from mpnn.data.text import Characters, batches, multi30k, pydoc_topics, tinyshakespeare
from mpnn.data.tu import GraphClassification, SmallGraph, tu

__all__ = [
    "SOURCES",
    "Characters",
    "DamagedFile",
    "DatasetNotFound",
    "GraphClassification",
    "NodeClassification",
    "PointClassification",
    "RemoteFile",
    "SmallGraph",
    "Source",
    "UnsafePickle",
    "batches",
    "cache_dir",
    "cora",
    "digits",
    "locate",
    "multi30k",
    "pydoc_topics",
    "row_normalize",
    "sentences",
    "tinyshakespeare",
    "tu",
]
