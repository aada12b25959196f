"""One operator over several processes: the nodes of a graph are divided over them, and each fetches the sources that
its destinations attend to. Sequences (context parallelism) and graphs (partitioning) are the same thing here.

    partition(graph, mesh)     the parts of one graph, what each fetches, and how even they are
    Part.open(folder)          this process's part of a graph that `mpnn graph cut` divided on the disk
    sharded(mesh)              a context in which models compute this process's part of every graph
    node_mean(losses)          a mean over the nodes of all processes, with the right gradients
    sum_gradients(parameters)  adds up gradients where neither DDP nor FSDP2 does it

Built on `torch.distributed`: processes are started by torchrun or any other launcher. Parameters are the business of
DDP or FSDP2, checkpoints that of `torch.distributed.checkpoint`.
"""

from mpnn.distributed.groups import node_mean, sum_gradients
from mpnn.distributed.halo import Part
from mpnn.distributed.owners import Owners
from mpnn.distributed.partition import Partition, partition
from mpnn.distributed.sharded import sharded

__all__ = ["Owners", "Part", "Partition", "node_mean", "partition", "sharded", "sum_gradients"]
