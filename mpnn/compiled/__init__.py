"""The operator under `torch.compile`: one custom operator stands for a whole request, whichever backend runs it.

While a program is traced, sizes may be symbols and nothing can be bound or planned. A request is therefore taken apart
into its tensors, its sizes and a string that says all the rest (`form`), and put together again by the operator,
`torch.ops.mpnn.run`, when the program runs: with real sizes, a bound graph and a plan (`operator`). Eager calls never
come here, and nothing imports this before a program is traced, as it imports torch's compiler.
"""

from mpnn.compiled.form import aggregator_of
from mpnn.compiled.operator import run
from mpnn.compiled.outline import Outline, built, outline

__all__ = ["Outline", "aggregator_of", "built", "outline", "run"]
