"""Datasets: each loader finds its files, validates them, and returns plain tensors or text.

| loader | content |
|---|---|
| `cora()`, `citeseer()` | citation graphs for node classification |
| `node_tables(nodes, labels, edges)` | files of your own: nodes with classes, labels or numbers, and edges |
| `graph_tables(graphs, nodes, edges)` | files of your own: many graphs with classes, labels or numbers |
| `link_tables(edges)` | files of your own: links, of relations and in time, with their split |
| `tu("MUTAG")`, `tu("PROTEINS")` | small graphs for graph classification |
| `digits()` | points for classification (scikit-learn) |
| `tinyshakespeare()`, `pydoc_topics()` | text for character models |
| `multi30k(split)` | English-German sentence pairs |
| `neighbor_batches(graph, nodes, fanouts, features)` | sampled batches for training on graphs of any size |
| `hetero_batches(graph, (kind, nodes), fanouts, features)` | the same for graphs of several kinds, with times |
| `link_batches(graph, links, fanouts)` | the same around links, without the links themselves |
| `split_links(graph)` | links for training, validation and test, and pairs without a link |
| `split_relation(graph, relation)` | the same for a relation of a graph of several kinds |
| `sentences()` | sentences for semantic search |
"""

from mpnn.data.digits import PointClassification as PointClassification, digits as digits
from mpnn.data.errors import DamagedFile as DamagedFile, DatasetNotFound as DatasetNotFound
from mpnn.data.graph_tables import graph_tables as graph_tables
from mpnn.data.link_batches import LinkBatch as LinkBatch, link_batches as link_batches
from mpnn.data.link_tables import LinkTables as LinkTables, link_tables as link_tables
from mpnn.data.links import LinkSplit as LinkSplit, split_links as split_links, split_relation as split_relation
from mpnn.data.locate import locate as locate
from mpnn.data.neighbors import (
    HeteroBatch as HeteroBatch,
    NeighborBatch as NeighborBatch,
    hetero_batches as hetero_batches,
    neighbor_batches as neighbor_batches,
)
from mpnn.data.planetoid import (
    NodeClassification as NodeClassification,
    citeseer as citeseer,
    cora as cora,
    row_normalize as row_normalize,
)
from mpnn.data.sentences import sentences as sentences
from mpnn.data.sources import SOURCES as SOURCES, RemoteFile as RemoteFile, Source as Source
from mpnn.data.tables import node_tables as node_tables
from mpnn.data.text import (
    Characters as Characters,
    batches as batches,
    multi30k as multi30k,
    pydoc_topics as pydoc_topics,
    tinyshakespeare as tinyshakespeare,
)
from mpnn.data.tu import GraphClassification as GraphClassification, SmallGraph as SmallGraph, tu as tu
from mpnn.graph.files import cache_dir as cache_dir
