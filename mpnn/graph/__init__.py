"""Graph: who hears whom, at a definite size."""

from mpnn.graph.graph import Graph

__all__ = ["Graph"]
