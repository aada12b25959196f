"""HGT: a transformer layer over nodes of several kinds, with keys and values that depend on the relation."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import ops
from mpnn.attention.spec import check_integers
from mpnn.graphs import HeteroGraph
from mpnn.graphs.kinds import EdgeKind
from mpnn.models.layers.hetero import check_kinds
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update.maps import Linear


class HGT(Model):
    """Heterogeneous graph transformer (Hu et al. 2020, arXiv:2003.01332, eq. 3 to 5, without time).

        w_ij = softmax_j( mu_r <Q_k h_i, A_r K_s h_j> / sqrt(D) )          over the in-neighbors of all relations r
        h_i <- b_k O_k gelu( || sum_j w_ij M_r V_s h_j ) + (1 - b_k) h_i          of kind k, from nodes j of kind s

    - topology: all relations as one graph, `HeteroGraph.stacked`, in which a node is a source for each relation
    - attention: dot product, one softmax over all relations
    - aggregate: sum
    - update: a map of each kind, and a learned gate b_k of the residual

    Args:
        in_dims: {kind: width of its features}.
        out_dim: width of the results, such as the number of classes.
        relations: the relations, (kind of the sources, name, kind of the destinations).
        dim: width of the states. heads: number of heads, which divides dim. layers: number of rounds.
    """

    def __init__(
        self,
        in_dims: Mapping[str, int],
        out_dim: int,
        relations: Sequence[EdgeKind],
        dim: int = 64,
        heads: int = 4,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({kind: Linear(width, dim) for kind, width in in_dims.items()})
        self.layers = nn.ModuleList(HGTLayer(dim, heads, [*in_dims], relations) for _ in range(layers))
        self.head = Linear(dim, out_dim)

    def forward(self, x: Mapping[str, Tensor], graph: HeteroGraph) -> dict[str, Tensor]:
        """Maps x {kind: [..., N_kind, width]} to {kind: [..., N_kind, out_dim]}."""
        check_kinds(x, *self.embed)
        for kind, embed in self.embed.items():
            validation.input_features(f"x[{kind!r}]", x[kind])
            validation.fits("HGT", f"x[{kind!r}]", x[kind], validation.takes(embed))
        h = {kind: F.relu(embed(x[kind])) for kind, embed in self.embed.items()}
        for layer in self.layers:
            h = layer(h, graph)
        return {kind: self.head(h[kind]) for kind in h}


class HGTLayer(nn.Module):
    """One round. Kinds that receive from no relation keep their states."""

    def __init__(self, dim: int, heads: int, kinds: Sequence[str], relations: Sequence[EdgeKind]) -> None:
        super().__init__()
        check_integers(dim=dim, heads=heads)
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        if missing := {kind for first, _, last in relations for kind in (first, last)} - set(kinds):
            raise ValueError(f"relations have nodes of {sorted(missing)}; pass their widths in in_dims")
        self.heads = heads
        self.relations = tuple(map(tuple, relations))
        self.project = nn.ModuleDict({kind: Linear(dim, 3 * dim) for kind in kinds})
        self.out = nn.ModuleDict({kind: Linear(dim, dim) for kind in kinds})
        self.gate = nn.ParameterDict({kind: nn.Parameter(torch.ones(())) for kind in kinds})
        count = len(self.relations)
        width = dim // heads
        self.of_key, self.of_value = (nn.Parameter(torch.empty(count, heads, width, width)) for _ in range(2))
        self.prior = nn.Parameter(torch.ones(count, heads))
        for maps in (self.of_key, self.of_value):
            nn.init.uniform_(maps, -((3 / width) ** 0.5), (3 / width) ** 0.5)

    def forward(self, x: Mapping[str, Tensor], graph: HeteroGraph) -> dict[str, Tensor]:
        """x {kind: [..., N_kind, dim]} -> the same shapes, updated."""
        if unknown := [relation for relation in graph if relation not in self.relations]:
            raise ValueError(
                f"HGT has no maps for the relation {unknown[0]}; it has {', '.join(map(str, self.relations))}"
            )
        check_kinds(x, *graph.num_nodes)
        parts = {k: self.project[k](x[k]).unflatten(-1, (3, self.heads, -1)).unbind(-3) for k in graph.num_nodes}
        number = {relation: k for k, relation in enumerate(self.relations)}
        keys = []
        values = []
        for relation in graph:
            r, (key, _, value) = number[relation], parts[relation[0]]
            maps = self.of_key[r] * self.prior[r, :, None, None], self.of_value[r]
            keys.append(torch.einsum("...nhd,hde->...nhe", key, maps[0]))
            values.append(torch.einsum("...nhd,hde->...nhe", value, maps[1]))
        query, key, value = (torch.cat(z, -3) for z in ([parts[k][1] for k in graph.num_nodes], keys, values))
        out = ops.attend(graph.stacked, query, key, value).flatten(-2)
        messages = dict(zip(graph.num_nodes, out.split([*graph.num_nodes.values()], -2), strict=True))
        gates = {kind: gate.sigmoid() for kind, gate in self.gate.items()}
        new = {kind: self.out[kind](F.gelu(messages[kind])) for kind in {relation[2] for relation in graph}}
        return {k: gates[k] * new[k] + (1 - gates[k]) * h if k in new else h for k, h in x.items()}
