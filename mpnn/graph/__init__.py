"""Graph: the edges between a fixed number of sources and destinations."""

from mpnn.graph.graph import Graph

__all__ = ["Graph"]
