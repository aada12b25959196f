"""A function of indices as the operations that it consists of, recorded by running it once.

torch's own tracer takes milliseconds, and patches classes of torch for all threads while it runs. What reaches torch's
dispatcher is recorded here in about 10 us an operation, so that a function can be recorded in each call. The record is
also the witness of what the function reads: its operations, the numbers in them, and the tensors that it captures, by
whatever way it reaches them. A function whose record is the same computes the same.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Mod = Callable[..., Tensor]
B, H, Q, KV = range(4)
_aten = torch.ops.aten
_LIKE = (_aten.new_ones, _aten.new_zeros, _aten.new_full, _aten.ones_like, _aten.zeros_like, _aten.full_like)
"""Operations that read no numbers; torch's `and_masks` and `noop_mask` begin with one."""


class Node:
    """An operation with its arguments, among them other nodes; or, without a target, an input or a captured tensor.

    `result`: what it returned when it was recorded; a captured tensor itself. None if it was added later.
    """

    __slots__ = ("args", "inputs", "kwargs", "result", "target")

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.result = result
        self.inputs = [x for x in _leaves(args, kwargs) if type(x) is Node]


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of an operation, and those in lists."""
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, (tuple, list)):
            yield from x
        else:
            yield x


def _mapped_leaves(args: tuple[Any, ...], kwargs: dict[str, Any], visit: Callable[[Any], Any]) -> Any:
    """The arguments of an operation, with those in lists replaced, too."""

    def mapped(x: Any) -> Any:
        return type(x)([visit(part) for part in x]) if isinstance(x, (tuple, list)) else visit(x)

    return tuple([mapped(x) for x in args]), {name: mapped(x) for name, x in kwargs.items()}


def call(target: Any, *args: Any, result: Tensor | None = None) -> Node:
    """A node that was not recorded. `result`: a tensor like its result, where that is known."""
    return Node(target, args, {}, result)


@dataclass(frozen=True, eq=False)
class Program:
    """A recorded function of (score,) b, h, q_idx and kv_idx, as far as one of its nodes, or a number.

    `nodes`: all that were recorded, in order. `inputs`: those of the arguments.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    node: Any

    def at(self, node: Any) -> "Program":
        return replace(self, node=node)

    @property
    def captured(self) -> list[Tensor]:
        """The tensors that the function captures."""
        return [x.result for x in self.nodes if x.target is None and x not in self.inputs]

    def depends_on(self) -> set[int]:
        """Which of b, h, q_idx and kv_idx the node depends on; -1 is the score."""
        before = ancestors(self.node)
        return {k - len(self.inputs) + 4 for k, x in enumerate(self.inputs) if x in before}

    def __call__(self, *at: Tensor) -> Tensor:
        """The number at scalars b, h, q_idx and kv_idx."""
        known: dict[Node, Any] = dict(zip(self.inputs[-4:], at, strict=True))

        def compute(x: Any) -> Any:
            if not isinstance(x, Node):
                return x
            if x not in known:
                if x.target is None:
                    return x.result
                args, kwargs = _mapped_leaves(x.args, x.kwargs, compute)
                known[x] = x.target(*args, **kwargs)
            return known[x]

        return compute(self.node) if isinstance(self.node, Node) else torch.tensor(self.node, dtype=torch.float64)

    def over(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """The numbers for each b, each h and each pair (q, kv), [B, H, E], or 1 where they do not depend on them."""
        of = self.depends_on()
        b = b if B in of else b[:1]
        h = h if H in of else h[:1]
        q, kv = (q, kv) if of & {Q, KV} else (torch.zeros(1, dtype=torch.int64),) * 2
        if not len(q):  # no edge, which torch.vmap does not take
            return torch.zeros(len(b), len(h), 0)
        return mapped(self, (B,), (H,), (Q, KV))(b, h, q, kv)

    def constant(self) -> float | None:
        """The number, if it depends on nothing and is not learned."""
        if self.depends_on():
            return None
        x = self(*[torch.zeros((), dtype=torch.int64)] * 4)
        return None if x.requires_grad or x.numel() != 1 else float(x)

    def product(self, x: Any, y: Any) -> Any:
        is_node = isinstance(x, Node) or isinstance(y, Node)
        return call(_aten.mul.Tensor, x, y) if is_node else x * y

    def is_by_offset(self) -> bool:
        """Whether numbers depend on q_idx and kv_idx by their difference alone."""
        ends = set(self.inputs[-2:])
        users = [x for x in ancestors(self.node) if ends & set(x.inputs)]
        return all(x.target in _OF_OFFSETS and len(x.args) == 2 and set(x.args) == ends and not x.kwargs for x in users)


_OF_OFFSETS = {
    *(_aten.sub.Tensor, _aten.eq.Tensor, _aten.ne.Tensor),
    *(_aten.lt.Tensor, _aten.le.Tensor, _aten.gt.Tensor, _aten.ge.Tensor),
}
"""Operations on two indices whose result follows from the difference of these."""


def ancestors(node: Any) -> set[Node]:
    """The nodes whose numbers a node is computed from, itself included."""
    reached = set[Node]()
    todo = [node] if isinstance(node, Node) else []
    while todo:
        last = todo.pop()
        reached.add(last)
        if getattr(last.target, "overloadpacket", None) not in _LIKE:
            todo += set(last.inputs) - reached
    return reached


def mapped(function: Mod, *levels: tuple[int, ...]) -> Mod:
    """The function of four vectors, of which those of a level move together; the first level is the outer dimension."""
    for level in reversed(levels):
        function = torch.vmap(function, tuple(0 if k in level else None for k in range(4)))
    return function


# ---------------------------------------------------------------------------------------------------- recording


def record(mod: Mod, score: torch.dtype | None = None, at: Sequence[int] = (0, 0, 0, 0)) -> Program:
    """Returns the program of a mask_mod, a function of b, h, q_idx and kv_idx, run at these indices; or of a score_mod,
    whose first argument is a score of this type.

    Raises:
        ValueError: it does not take these arguments, reads their numbers, writes to tensors or draws random numbers.
    """
    name = "mask_mod" if score is None else "score_mod"
    transformed = torch._C._are_functorch_transforms_active()
    # What a transform of torch.func wraps would be recorded without its wrapper: `_Calls` refuses it.
    with torch.no_grad(), torch._C._DisableFuncTorch():
        inputs = [torch.scalar_tensor(k, dtype=torch.int64, device="cpu") for k in at]
        if score is not None:
            inputs.insert(0, torch.zeros((), dtype=score, device="cpu"))
        recorder = _Recorder(name, inputs)
        with _Calls(name, transformed), recorder:
            try:
                out = mod(*inputs)
            except (RuntimeError, TypeError) as error:
                raise ValueError(_sentence(name, "`if` and `item`", str(error))) from error
    node = recorder.node_of(out)
    nodes = tuple(recorder.nodes)
    return Program(nodes, nodes[: len(inputs)], node)


def _sentence(name: str, ways: str, why: str) -> str:
    """The message about a function that reads the numbers of its arguments."""
    arguments = "b, h, q_idx, kv_idx" if name == "mask_mod" else "score, b, h, q_idx, kv_idx"
    return f"{name} must be a function of ({arguments}) that reads no numbers, as {ways} do: {why}"


class _Calls(TorchFunctionMode):
    """Calls of torch's Python functions while a function is recorded. Indexing by scalar tensors reads no number, so
    that it can be recorded."""

    def __init__(self, name: str, transformed: bool) -> None:
        super().__init__()
        self.name = name
        self.transformed = transformed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.transformed and any(map(_is_wrapped, _leaves(args, kwargs or {}))):
            raise ValueError(
                f"{self.name} captures a tensor that torch.func transforms; differentiate by torch.autograd.grad, or "
                "write the bias as in mpnn.ops.attend"
            )
        if func is Tensor.__getitem__:
            index = args[1] if type(args[1]) is tuple else (args[1],)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, (Tensor, int)) for i in index):
                return _aten.index(args[0], [torch.as_tensor(i) for i in index])
        return func(*args, **(kwargs or {}))


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


class _Recorder(TorchDispatchMode):
    """Records the operations that reach torch's dispatcher."""

    def __init__(self, name: str, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.name = name
        self.nodes = [Node(None, (), {}, x) for x in inputs]
        self._of_inputs = set(self.nodes)
        # Nodes hold their results, so that an id stays that of one tensor.
        self._by_id = {id(node.result): node for node in self.nodes}

    def node_of(self, x: Any) -> Any:
        """The node of a tensor, which is captured if no operation returned it; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self._by_id:
            if type(x) not in (Tensor, torch.nn.Parameter):
                raise ValueError(
                    f"{self.name} captures a {type(x).__name__}, and may compute with it what torch's operations do "
                    "not show; capture x.as_subclass(torch.Tensor)"
                )
            self._add(Node(None, (), {}, x))
        return self._by_id[id(x)]

    def _add(self, node: Node) -> None:
        self.nodes.append(node)
        self._by_id[id(node.result)] = node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_unfit, reads_numbers = _facts(func)
        if is_unfit:
            raise ValueError(f"{self.name} must not write to tensors or draw random numbers; it does so by {func}")
        kwargs = kwargs or {}
        recorded_args, recorded_kwargs = _mapped_leaves(args, kwargs, self.node_of)
        node = Node(func, recorded_args, recorded_kwargs, None)
        depends = not self._of_inputs.isdisjoint(node.inputs)
        if depends and reads_numbers:
            raise RuntimeError(f"it calls {func}")
        result = func(*args, **kwargs)
        node.result = result
        self._add(node)
        added = [node]
        for k, part in enumerate(result if isinstance(result, (tuple, list)) else ()):
            added.append(Node(operator.getitem, (node, k), {}, part))
            self._add(added[-1])
        if depends:
            self._of_inputs.update(added)
        return result


@cache
def _facts(operation: Any) -> tuple[bool, bool]:
    """Whether an operation writes to tensors or draws random numbers, and whether it returns numbers to Python."""
    tags = operation.tags
    is_unfit = operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags
    return is_unfit, torch.Tag.data_dependent_output in tags


# ---------------------------------------------------------------------------------------------------- a witness


@dataclass(frozen=True, eq=False)
class Witness:
    """Tells whether a function still computes what a program does: its operations, and copies of the tensors that
    it captures. Copies, because torch does not count all writes to a tensor."""

    form: tuple[Any, ...]
    copies: tuple[Tensor | None, ...]

    @staticmethod
    def of(program: Program) -> "Witness":
        return Witness(_form(program), tuple(map(_copy, program.captured)))

    def agrees(self, program: Program) -> bool:
        """Whether a program, recorded later, is the same."""
        if _form(program) != self.form:
            return False
        pairs = zip(program.captured, self.copies, strict=True)
        return all(copy is not None and _is_equal(x, copy) for x, copy in pairs)


def check_constant(program: Program, mod: Mod, sizes: Sequence[int], score: torch.dtype | None = None) -> None:
    """Raises ValueError unless a function, recorded at the first indices, is the same at the last ones of these sizes.
    If it is not, it has read the numbers of its indices in a way that torch does not see."""
    last = [max(n - 1, 0) for n in sizes]
    other = record(mod, score, last) if any(last) else program
    pairs = list(zip(program.captured, other.captured, strict=False))
    if _form(program) != _form(other) or not all(x is y or _is_equal(x, y) for x, y in pairs):
        name = "mask_mod" if score is None else "score_mod"
        raise ValueError(_sentence(name, "`tolist` and `numpy`", "it is another function at other indices"))


def _form(program: Program) -> tuple[Any, ...]:
    """The operations of a program, in order; nodes by their number, other arguments with their type, because 1 is not
    True."""
    number = {node: k for k, node in enumerate(program.nodes)}

    form: list[Any] = []
    for node in (*program.nodes, Node(None, (program.node,), {}, None)):
        result = node.result
        form += node.target, *node.kwargs, *((result.dtype, result.shape) if isinstance(result, Tensor) else ())
        for x in _leaves(node.args, node.kwargs):
            form += (Node, number[x]) if type(x) is Node else (type(x), x)
    return tuple(form)


def _packed(x: Tensor) -> Tensor:
    """A tensor without the dimensions along which it repeats itself."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def _is_plain(x: Tensor) -> bool:
    """Whether the numbers of a tensor are those in its memory, so that they can be compared."""
    return x.layout is torch.strided and x.device.type == "cpu" and not x.is_quantized


def _copy(x: Tensor) -> Tensor | None:
    """A copy of the numbers; None if they cannot be compared."""
    return _packed(x.detach()).clone() if _is_plain(x) else None


def _is_equal(x: Tensor, copy: Tensor) -> bool:
    """Whether a tensor holds the numbers of a copy. Forms have its shape and its type."""
    if not _is_plain(x) or not _is_plain(copy):
        return False
    packed = _packed(x.detach())
    copy = _packed(copy.detach())
    if packed.shape != copy.shape:
        return False
    # NaN is not equal to itself, and may be what a table holds.
    return torch.equal(packed, copy) or bool(((packed == copy) | (packed.isnan() & copy.isnan())).all())
