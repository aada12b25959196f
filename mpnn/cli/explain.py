"""`mpnn explain`: the execution plan of dot-product attention over a topology, without running it."""

import json
from dataclasses import asdict
from typing import Annotated, Literal

import torch
import typer
from torch._subclasses.fake_tensor import FakeTensorMode

import mpnn
from mpnn.cli.console import exit_on_invalid_input, refuse
from mpnn.cli.expressions import bind
from mpnn.engine.plan import plan
from mpnn.round import Round
from mpnn.scores import Dot

Dtype = Literal["float32", "float16", "bfloat16", "float64"]
Device = Literal["cpu", "cuda"]
ABOUT_CUDA = "Estimates for cuda come from half of the published rates of an H100. They are not measured."


def explain(
    expression: Annotated[
        str, typer.Argument(metavar="EXPR", help='A topology, such as "causal & window(16)"; see mpnn graph --help.')
    ],
    n: Annotated[int, typer.Option("--n", help="Length of the sequence.")] = 4096,
    heads: Annotated[int, typer.Option(help="Number of heads.")] = 8,
    dim: Annotated[int, typer.Option(help="Width of each head.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the features.")] = "float32",
    device: Annotated[Device, typer.Option(help="Where it would run; a GPU need not be there.")] = "cpu",
    grad: Annotated[
        bool, typer.Option("--grad/--no-grad", help="Whether gradients are computed, as in training.")
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: seconds and bytes, null where a backend cannot run."),
    ] = False,
) -> None:
    """Show which backend would run dot-product attention over a topology, its estimated time, and why others would not.

    Nothing is run and no features are allocated. Times and memory are
    estimates of the planner.

    Examples:
    \b
      mpnn explain "causal & window(256)" --n 4096 --heads 8 --dim 64
      mpnn explain "longformer(512, globals=4)" --n 16384 --no-grad
      mpnn explain causal --batch 8 --dtype bfloat16
      mpnn explain causal --n 100000 --json
      mpnn explain "causal & window(256)" --device cuda --dtype bfloat16
    """
    for name, value in (("heads", heads), ("dim", dim), ("batch", batch)):
        if not 1 <= value < 2**31:
            refuse(f"--{name} must be at least 1 and less than 2**31; got {value}")
    with exit_on_invalid_input():
        graph = bind(expression, n)
        described = plan(_round(graph, (batch, n, heads, dim), getattr(torch, dtype), device, grad))
        note = {} if device == "cpu" else {"note": ABOUT_CUDA}
        if as_json:
            print(json.dumps(asdict(described) | note, indent=1).replace("Infinity", "null"))
        else:
            print("\n".join([str(described), *note.values()]))


def _round(graph: mpnn.Graph, shape: tuple[int, ...], dtype: torch.dtype, device: str, grad: bool) -> Round:
    """A round whose features have no memory, so the device need not exist."""
    with FakeTensorMode():
        shape = shape if shape[0] > 1 else shape[1:]
        features = torch.empty(shape, dtype=dtype, device=device).requires_grad_(grad)
    return Round(graph, features, Dot(features, features, shape[-1] ** -0.5))
