"""`mpnn tune`: measures what operations cost on this machine, for all plans from now on."""

import os
import time
from typing import Annotated

import torch
import typer

from mpnn.backends import tuned
from mpnn.cli.console import console, refuse
from mpnn.graph.files import write_atomically


def tune(
    threads: Annotated[
        int, typer.Option(help="Tune for this number of threads; 0: the number that torch uses here.")
    ] = 0,
    forget: Annotated[bool, typer.Option("--forget", help="Delete what was measured for these threads.")] = False,
) -> None:
    """Measure how fast this machine runs each backend, so that plans choose the fastest.

    The command takes some seconds. It runs small rounds of message passing on every backend that may be the fastest,
    and linear maps. Before this command, plans use times of the machine that the library was developed on.

    The result holds for this processor, its instruction set, the number of threads, and the versions of torch and of
    mpnn's own times. It is a file in the folder MPNN_CACHE, or in the folder mpnn of the platform's caches. Later
    processes read this file. No other command and no import writes it.

    Examples:
    \b
      mpnn tune
      mpnn tune --threads 1
      mpnn tune --forget
    """
    if not 0 <= threads <= 4 * (os.cpu_count() or 1):
        refuse(f"--threads must be 0 to {4 * (os.cpu_count() or 1)}; got {threads}")
    if threads:
        torch.set_num_threads(threads)
    threads = torch.get_num_threads()
    try:
        file = tuned.path(threads)
    except FileNotFoundError as error:
        refuse(f"there is no folder for what is measured: {error}")
    if forget:
        file.unlink(missing_ok=True)
        console.print(f"deleted {file}", soft_wrap=True, markup=False)
        return
    from mpnn.engine import tune as engine

    began = time.perf_counter()
    prices = {**engine.tune(), **engine.tune_maps()}
    taken = time.perf_counter() - began
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda temporary: temporary.write_text(tuned.text(prices, threads)))
    except OSError as error:
        refuse(f"cannot write {file}: {error}; name a folder you can write to in the environment variable MPNN_CACHE")
    known = {**tuned.shipped()["nanoseconds"], **tuned.shipped()["maps"]["nanoseconds"]}
    for name, costs in prices.items():
        factors = sorted(costs[kind] / known[name][kind] for kind in costs)
        middle = factors[len(factors) // 2]
        console.print(f"{name:<10} {middle:.2f} x the shipped prices ({factors[0]:.2f} to {factors[-1]:.2f})")
    console.print(f"{threads} threads, {taken:.1f} s: wrote {file}", soft_wrap=True, markup=False)
