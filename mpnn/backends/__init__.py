"""The list of backends, which compute rounds: the library's own and those that users register."""

from typing import Protocol, TypeVar

from mpnn.backends import csr, dense, edge_list, scan, scatter, tiles
from mpnn.backends.cost_model import Estimate
from mpnn.round import Result, Round


class Backend(Protocol):
    """Computes rounds. A module or an object with these five members is a backend.

    `NAME` is what users pass as `backend="name"`. `SERVES` are the needs that it serves, see `mpnn.round.needs`. The
    engine refuses a round with any other need, with an error message of `mpnn.round.needs.SENTENCES` or of the
    backend's own dictionary `REASONS`. So a feature that is added to rounds later is refused until the backend says
    that it serves it.

    For each new form of a round over a kind of graphs (`mpnn/engine/steps.py`), `refusal` and `estimate` are called
    once, and only if all needs are served; `run` is called each time. None of them modifies the round.

    Optional members:
        bind(round): returns a function from a round to a `Result`, which the engine calls in place of `run` for all
            rounds of this form over graphs of this kind. It computes once what the form decides: classes, dtypes,
            widths, strides, texts, flags. It reads numbers, tensors and the graph from the round of each call, and
            keeps neither the round nor a list of edges.
        serves(round): returns (SERVES, REASONS), for a backend that serves other needs on other devices. It depends on
            the round's signature only; conditions on graphs belong in `refusal`.
        ANY_EDGES: True if `refusal` and `estimate` depend on the kind of a list of edges only, so that a layer whose
            graph is new in each call plans once.
        TRACED: True if it consists of torch's operations only, which transforms of torch.func (grad, jvp, vmap,
            hessian) trace. Within them, "auto" chooses among these.
        has_tangents(round): whether its kernels have forward-mode derivatives (jvp) of a round that it serves. In
            forward mode, "auto" chooses among these first. `run` runs then, and not what `bind` returns.
    """

    NAME: str
    SERVES: frozenset[str]

    def refusal(self, round: Round) -> str | None:
        """Returns None if `run` computes rounds of these shapes, else the reason why not: a clause such as "there is no
        head to compute". Users read it in `explain` and in the error if they name this backend."""

    def estimate(self, round: Round) -> Estimate:
        """Returns the expected time and memory of a round that this backend runs. The lowest time is chosen."""

    def run(self, round: Round) -> Result:
        """Returns the results of the round by name, see `Result`. Results besides `out` are needs: a backend that
        serves none of them returns `Result(out)`. A tuple (out, weights) is converted to `Result(out, weights)`.
        `edge_list` defines the values."""


__all__ = ["BACKENDS", "Backend", "Estimate", "Result", "register", "registered"]

BACKENDS: tuple[Backend, ...] = (dense, tiles, scan, csr, scatter, edge_list)

B = TypeVar("B", bound=Backend)
_registered = BACKENDS


def registered() -> tuple[Backend, ...]:
    """Returns all backends: BACKENDS, and those added by `register`."""
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
