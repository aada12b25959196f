"""One graph over several processes: GraphSAGE on Cora, whose papers are divided over them.

    torchrun --nproc-per-node 2 examples/partitioned_graph.py      METIS cuts few citations, with the package pymetis
    python examples/partitioned_graph.py --epochs 3                one process, a quick test

Each process has some papers and fetches the papers that these cite from the others. Losses are those of one process,
up to rounding, which grows with the epochs.
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.nn import functional as F

from mpnn import graphs
from mpnn.data import cora, row_normalize
from mpnn.distributed import node_mean, partition, sharded, sum_gradients
from mpnn.models import GraphSAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--balance", choices=("metis", "edges"), default="metis" if find_spec("pymetis") else "edges")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = cora()
    citations = graphs.from_edges(data.edge_index, data.num_nodes)
    part = partition(citations, balance=options.balance)
    x, y = part.scatter(row_normalize(data.x)), part.scatter(data.y, 0)
    train, test = (part.scatter(mask, 0) for mask in (data.train_mask, data.test_mask))
    torch.manual_seed(0)  # the same weights everywhere
    model = GraphSAGE(data.x.shape[1], data.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    if dist.get_rank() == 0:
        print(part.explain(data.x.shape[1]), flush=True)
    for epoch in range(options.epochs):
        torch.manual_seed(epoch)  # the same dropout everywhere
        with sharded(part):
            losses = F.cross_entropy(model(x, citations)[train], y[train], reduction="none")
            loss = node_mean(losses, averaged=False)
            optimizer.zero_grad()
            loss.backward()
        sum_gradients(model.parameters())
        optimizer.step()
        if epoch % 20 == 0 or epoch == options.epochs - 1:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {epoch + 1}: loss {float(total):.5f}", flush=True)
    with torch.no_grad(), sharded(part):
        correct = (model.eval()(x, citations).argmax(-1) == y)[test]
    counts = torch.tensor([int(correct.sum()), len(correct)])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"test accuracy {int(counts[0]) / int(counts[1]):.1%} on {dist.get_world_size()} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
