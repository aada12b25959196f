"""The list of backends, which compute rounds: the library's own and those that users register."""

from typing import TypeVar

from mpnn.backends import csr, dense, edge_list, scan, scatter, tiles
from mpnn.backends.backend import Backend
from mpnn.backends.cost_model import Estimate

__all__ = ["BACKENDS", "Backend", "Estimate", "register", "registered"]

BACKENDS: tuple[Backend, ...] = (dense, tiles, scan, csr, scatter, edge_list)

B = TypeVar("B", bound=Backend)
_registered = BACKENDS


def registered() -> tuple[Backend, ...]:
    """All backends: BACKENDS, and those added by `register`."""
    return _registered


def register(backend: B) -> B:
    """Adds a backend, so that `backend="name"`, `explain` and the plan know it, and returns it.

    A backend with the name of one registered before replaces it, as when a notebook cell runs again.

    Raises:
        TypeError: if `backend` is a class or lacks a member of `Backend`; the message lists the missing ones.
        ValueError: if its name is not an identifier, or is "auto" or the name of one of BACKENDS.
    """
    global _registered
    if isinstance(backend, type):
        raise TypeError(f"a backend is an object or a module, but {backend.__name__} is a class; pass an instance")
    if missing := [name for name in ("NAME", "SERVES", "refusal", "estimate", "run") if not hasattr(backend, name)]:
        raise TypeError(
            f"a backend has NAME, SERVES, refusal, estimate and run; {backend!r} lacks {', '.join(missing)}"
        )
    if not isinstance(backend.SERVES, (set, frozenset)):
        raise TypeError(f"SERVES of a backend must be a set of needs; got {type(backend.SERVES).__name__}")
    if type(backend).__hash__ is None:
        raise TypeError(f"a backend must be hashable, as @dataclass(eq=False) is; got {type(backend).__name__}")
    name = backend.NAME
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"NAME of a backend must be an identifier, such as 'my_kernels'; got {name!r}")
    if name == "auto" or name in (b.NAME for b in BACKENDS):
        raise ValueError(f"{name!r} is taken: auto, {', '.join(b.NAME for b in BACKENDS)} are this library's names")
    _registered = (*(b for b in _registered if name != b.NAME), backend)
    return backend
