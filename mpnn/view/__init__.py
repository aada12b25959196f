"""The viewer: one HTML file that shows a graph, what its nodes learn from, attention over it, and its plan.

Its browser side is written in TypeScript, in `viewer/` next to this file, and is installed prebuilt as
`static/viewer.js`. The page needs no network and no server.
"""

from mpnn.view.page import Page
from mpnn.view.topology import of_topology

__all__ = ["Page", "of_topology"]
