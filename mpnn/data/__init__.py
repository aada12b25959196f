"""Real data to run on: each loader finds its files, checks them, and returns plain tensors or text.

| loader | what |
|---|---|
| `cora()` | citation graph, nodes to classify |
| `tu("MUTAG")`, `tu("PROTEINS")` | small graphs to classify |
| `digits()` | points to classify (scikit-learn) |
| `city()`, `trips(city, ...)` | made-up traffic: times of segments and routes to predict |
| `tinyshakespeare()`, `pydoc_topics()` | text, read character by character |
| `multi30k(split)` | English-German sentence pairs |
| `sentences()` | sentences to search in |
| `cities()`, `tsp_weights()` | points to visit, and the weights of a model that finds short tours |
"""

from mpnn.data.city import City, Trips, city, trips
from mpnn.data.digits import PointClassification, digits
from mpnn.data.errors import DamagedFile, DatasetNotFound, UnsafePickle
from mpnn.data.locate import cache_dir, locate
from mpnn.data.planetoid import NodeClassification, cora, row_normalize
from mpnn.data.sentences import sentences
from mpnn.data.sources import SOURCES, RemoteFile, Source
from mpnn.data.text import Characters, batches, multi30k, pydoc_topics, tinyshakespeare
from mpnn.data.tsp import cities, tsp_weights
from mpnn.data.tu import GraphClassification, SmallGraph, tu

__all__ = [
    "SOURCES",
    "Characters",
    "City",
    "DamagedFile",
    "DatasetNotFound",
    "GraphClassification",
    "NodeClassification",
    "PointClassification",
    "RemoteFile",
    "SmallGraph",
    "Source",
    "Trips",
    "UnsafePickle",
    "batches",
    "cache_dir",
    "cities",
    "city",
    "cora",
    "digits",
    "locate",
    "multi30k",
    "pydoc_topics",
    "row_normalize",
    "sentences",
    "tinyshakespeare",
    "trips",
    "tsp_weights",
    "tu",
]
