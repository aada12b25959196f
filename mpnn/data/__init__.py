"""Datasets: each loader finds its files, validates them, and returns plain tensors or text.

| loader | content |
|---|---|
| `cora()`, `citeseer()` | citation graphs for node classification |
| `node_tables(features, labels, edges)` | files of your own for node classification |
| `tu("MUTAG")`, `tu("PROTEINS")` | small graphs for graph classification |
| `digits()` | points for classification (scikit-learn) |
| `fashion_mnist(split)` | pictures of clothes, 28 x 28 pixels |
| `city()`, `trips(city, ...)` | simulated traffic, to predict the times of segments and routes |
| `tinyshakespeare()`, `pydoc_topics()` | text for character models |
| `multi30k(split)` | English-German sentence pairs |
| `neighbor_batches(graph, nodes, fanouts, features)` | sampled batches for training on graphs of any size |
| `sentences()` | sentences for semantic search |
| `cities()`, `tsp_weights()` | travelling salesman instances, and the weights of a model for them |
"""

from mpnn.data.city import City, Trips, city, trips
from mpnn.data.digits import PointClassification, digits
from mpnn.data.errors import DamagedFile, DatasetNotFound
from mpnn.data.fashion_mnist import fashion_mnist
from mpnn.data.locate import locate
from mpnn.data.neighbors import NeighborBatch, neighbor_batches
from mpnn.data.planetoid import NodeClassification, citeseer, cora, row_normalize
from mpnn.data.sentences import sentences
from mpnn.data.sources import SOURCES, RemoteFile, Source
from mpnn.data.tables import node_tables
from mpnn.data.text import Characters, batches, multi30k, pydoc_topics, tinyshakespeare
from mpnn.data.tsp import cities, tsp_weights
from mpnn.data.tu import GraphClassification, SmallGraph, tu
from mpnn.files import cache_dir

__all__ = [
    "SOURCES",
    "Characters",
    "City",
    "DamagedFile",
    "DatasetNotFound",
    "GraphClassification",
    "NeighborBatch",
    "NodeClassification",
    "PointClassification",
    "RemoteFile",
    "SmallGraph",
    "Source",
    "Trips",
    "batches",
    "cache_dir",
    "citeseer",
    "cities",
    "city",
    "cora",
    "digits",
    "fashion_mnist",
    "locate",
    "multi30k",
    "neighbor_batches",
    "node_tables",
    "pydoc_topics",
    "row_normalize",
    "sentences",
    "tinyshakespeare",
    "trips",
    "tsp_weights",
    "tu",
]
