"""Prices measured on this machine: where `mpnn tune` keeps them, and when they hold.

They hold for one processor, instruction set, number of threads, version of torch and table of shipped prices; each
combination has its own file in `mpnn.graph.files.cache_dir()`. Only the command `mpnn tune` writes there.
"""

import hashlib
import json
import platform
import re
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any
from warnings import warn

import torch

from mpnn.graph.files import cache_dir

Prices = dict[str, dict[str, float]]


def path(threads: int) -> Path:
    """The file for this machine and this many threads."""
    named = json.dumps(machine(threads), sort_keys=True).encode() + _shipped_text().encode()
    return cache_dir() / f"prices-{hashlib.sha256(named).hexdigest()[:16]}.json"


def machine(threads: int) -> dict[str, Any]:
    """Returns the facts that the prices depend on besides the shipped table."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"processor": processor(), "instructions": instructions, "threads": threads, "torch": torch.__version__}


def read(threads: int) -> Prices:
    """The prices in the file, or none. A file that cannot be read is left out, with a warning."""
    try:
        file = path(threads)
        prices: Prices = json.loads(file.read_text())["nanoseconds"]
        return {name: {kind: _price(x) for kind, x in costs.items()} for name, costs in prices.items()}
    except FileNotFoundError:  # nothing was tuned, or there is no folder for caches
        return {}
    except (OSError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        warn(f"the tuned prices in {file} cannot be read: {error}; run mpnn tune, or delete the file", stacklevel=2)
        return {}


def _price(x: Any) -> float:
    price = float(x)
    if not 0 <= price < inf:  # NaN would win every comparison of plans, or lose it
        raise ValueError(f"a price must be a finite number of nanoseconds; got {price}")
    return price


def text(prices: Prices, threads: int) -> str:
    """The contents of the file."""
    return json.dumps({"measured": machine(threads), "nanoseconds": prices}, indent=1) + "\n"


@cache
def shipped() -> dict[str, Any]:
    """The contents of `costs.json`: prices, and the machine that they were measured on."""
    costs: dict[str, Any] = json.loads(_shipped_text())
    return costs


@cache
def _shipped_text() -> str:
    return (files("mpnn.backends") / "costs.json").read_text()


@cache
def processor() -> str:
    """The name of the processor."""
    name = re.search(r"^model name\s*: (.+)$", _cpuinfo(), re.M)
    return name[1].strip() if name else platform.processor() or platform.machine()


@cache
def family() -> str:
    """The maker and the family of the processor, such as "AuthenticAMD 26" (Zen 5), or nothing if unknown."""
    maker, number = (re.search(rf"^{name}\s*: (\w+)", _cpuinfo(), re.M) for name in ("vendor_id", "cpu family"))
    if maker is None or number is None:  # as Windows writes it
        text = platform.processor()
        maker, number = re.search(r", (\w+)$", text), re.search(r"Family (\d+)", text)
    return "" if maker is None or number is None else f"{maker[1]} {number[1]}"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
