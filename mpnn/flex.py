"""torch's FlexAttention (Dong et al. 2024, arXiv:2412.05496) on a CPU, with gradients: the same functions, over graphs.

    from mpnn.flex import create_block_mask, flex_attention        instead of torch.nn.attention.flex_attention

A mask_mod is evaluated in blocks of rows, which become runs of a graph. A score_mod is traced to

    factor * score, or factor * tanh(inner * score); plus biases, and -inf where a condition does not hold

whose numbers are functions of (b, h, q_idx, kv_idx): biases of nodes, by offset or per edge, and multiples of the query
or the key. Tensors that it captures get gradients. Any other score_mod is refused with the operation that does not fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import inf
from operator import and_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as of_torch
from torch.overrides import TorchFunctionMode

from mpnn import graphs, ops
from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import at_least
from mpnn.graph.edge_tables import BiasTable, PerEdge
from mpnn.graph.modes import uncompiled
from mpnn.graph.relations import Offset
from mpnn.graph.runs import Runs
from mpnn.graphs.jagged import is_jagged, lengths_of, like, values_of
from mpnn.ops import NodeBias
from mpnn.round import validation
from mpnn.scores import check_scale

Mod = Callable[..., Tensor]
_PAIRS = 1 << 20  # of a mask that are evaluated at once
_MOST_PAIRS = 1 << 38  # an hour
_B, _H, _Q, _KV = range(4)
_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask_mod as graphs: `graphs[b][h]`, with one entry where it does not depend on the batch or the head.
    `depends_on` has 0 if it depends on b, and 1 if it depends on h."""

    mask_mod: Mod
    graphs: list[list[Graph]]
    depends_on: set[int]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        one = self.graphs[0][0]
        return len(self.graphs), len(self.graphs[0]), one.num_dst, one.num_src


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> BlockMask:
    """The graph of a mask_mod, as `torch.nn.attention.flex_attention.create_block_mask`.

    Args:
        mask_mod: a function of (b, h, q_idx, kv_idx), int64 scalars, that returns whether q_idx attends to kv_idx. It
            is evaluated for each batch entry and each head if it depends on them, for one if not.
        B, H: size of the batch and number of heads; None is 1.
        device: None or "cpu". BLOCK_SIZE, _compile: no effect, because tiles follow from runs, for any length.

    Raises:
        ValueError: mask_mod is not such a function, or `device` is another one.
        TypeError: a size is not an integer.
    """
    _check_device(device)
    B, H = at_least("B", 1 if B is None else B, 0), at_least("H", 1 if H is None else H, 0)
    Q_LEN, KV_LEN = at_least("Q_LEN", Q_LEN, 0), at_least("KV_LEN", KV_LEN, 0)
    program = _trace(mask_mod)
    return BlockMask(mask_mod, _graphs([program], B or 1, H or 1, Q_LEN, KV_LEN), program.depends_on() & {_B, _H})


@dataclass(frozen=True, eq=False)
class NestedBlockMask:
    """The block masks of sequences of different lengths, one each."""

    masks: list[BlockMask]


def create_nested_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    q_nt: Tensor,
    kv_nt: Tensor | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> NestedBlockMask:
    """The graphs of a mask_mod over jagged queries and keys [B, H, j, D], as torch's function of this name up to 2.9.

    Args:
        mask_mod: as of `create_block_mask`; q_idx and kv_idx count from the beginning of a sequence, and b is its
            number.
        B: no effect: there are as many sequences as the tensors have. H: the number of heads; None is 1.
        kv_nt: default q_nt. BLOCK_SIZE, _compile: no effect.
    """
    lengths = zip(_sequences("q_nt", q_nt), _sequences("kv_nt", q_nt if kv_nt is None else kv_nt), strict=True)
    sizes = [(len(q), len(kv)) for q, kv in lengths]
    return NestedBlockMask([create_block_mask(_of_sequence(mask_mod, k), 1, H, m, n) for k, (m, n) in enumerate(sizes)])


def _sequences(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """The sequences of a jagged tensor [B, H, j, D], [n, H, D] each."""
    _check_device(x.device)
    if not is_jagged(x) or x._ragged_idx != 2:  # type: ignore[attr-defined]  # of jagged tensors alone
        raise ValueError(f"{name} must be jagged, [B, H, j, D], as the other tensors are; got {list(x.shape)}")
    return values_of(name, x.transpose(1, 2)).split(lengths_of(x))


def _of_sequence(mod: Mod, number: int) -> Mod:
    """A mod with the number of a sequence in the place of b."""

    def shifted(*at: Any) -> Tensor:
        *score, b, h, q_idx, kv_idx = at
        return mod(*score, b + number, h, q_idx, kv_idx)

    return shifted


def _over_sequences(
    qkv: tuple[Tensor, Tensor, Tensor], score_mod: Any, block_mask: Any, options: dict[str, Any]
) -> Any:
    """`flex_attention` of each sequence; the result and the log-sum-exp are jagged."""
    parts = [_sequences(name, x) for name, x in zip(("query", "key", "value"), qkv, strict=True)]
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"query, key and value must be of as many sequences; got {[len(part) for part in parts]}")
    masks = [None] * len(parts[0])
    if block_mask is not None:
        if not isinstance(block_mask, NestedBlockMask) or len(block_mask.masks) != len(masks):
            raise ValueError(f"jagged tensors need a block_mask of create_nested_block_mask, of {len(masks)} sequences")
        masks = block_mask.masks  # type: ignore[assignment]
    outs = []
    sums = []
    for k, (q, key, value, mask) in enumerate(zip(*parts, masks, strict=True)):
        mod = None if score_mod is None else _of_sequence(score_mod, k)
        q, key, value = (x.transpose(0, 1)[None] for x in (q, key, value))
        out, lse = flex_attention(q, key, value, mod, mask, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0].transpose(0, 1))
    return tuple(like(torch.cat(x), qkv[0]).transpose(1, 2) for x in (outs, sums))


@uncompiled
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention with a score_mod and a block mask, as `torch.nn.attention.flex_attention.flex_attention`.

        out_i = sum_j softmax_j( score_mod(scale * <query_i, key_j>, b, h, i, j) ) value_j      over the j of the mask

    Args:
        query: [B, H, N, D]. key: [B, H_kv, M, D]. value: [B, H_kv, M, D_v]. On a CPU. All three may be jagged,
            [B, H, j, D]: functions count from the beginning of each sequence, and b is its number.
        score_mod: a function of (score, b, h, q_idx, kv_idx). It may add functions of the last four, multiply by
            functions of (b, h, q_idx) or of (b, h, kv_idx), apply `c * tanh(score / c)` before it adds, and return -inf
            by `torch.where`. The condition is evaluated in each call; a mask_mod is not.
        block_mask: of `create_block_mask`, here or of torch; of `create_nested_block_mask` for jagged tensors.
        scale: default 1 / sqrt(D), and 1 for a width of 0.
        enable_gqa: allows H to be a multiple of H_kv.
        return_lse: also return the log-sum-exp of the scores, [B, H, N]; -inf for a row without edges.
        kernel_options: of GPU kernels; no effect.
        return_aux: torch's `AuxRequest`, of `lse` alone: return its `AuxOutput`, too.

    Returns:
        out [B, H, N, D_v], (out, lse) or (out, AuxOutput). A row without edges gets zeros.

    Raises:
        ValueError: shapes do not fit together, score_mod has another form (the message names the operation), or
            `return_aux` asks for more than `lse`.
    """
    if return_aux is not None and (return_lse or return_aux.max_scores):
        raise ValueError("return_aux may ask for lse, not for max_scores, and goes without return_lse")
    if is_jagged(query):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _asked(_over_sequences((query, key, value), score_mod, block_mask, options), return_lse, return_aux)
    for name, x in (("query", query), ("key", key), ("value", value)):
        validation.tensor(name, x)
        _check_device(x.device)
        if x.dim() != 4:
            raise ValueError(f"query, key and value must have shape [B, H, N, D]; got {list(x.shape)}")
    batch, heads, *sizes = *query.shape[:3], key.shape[2]
    if len(key) != batch or key.shape[:3] != value.shape[:3]:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(f"expected query [B, H, N, D], key [B, H_kv, M, D] and value [B, H_kv, M, D_v]; got {shapes}")
    if heads != key.shape[1] and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {key.shape[1]}; pass enable_gqa=True")
    if 0 in (batch, heads, *sizes):
        score_mod = block_mask = None  # no pair to evaluate
    dtype = torch.promote_types(query.dtype, torch.float32)
    form = _Form() if score_mod is None else _form(_trace(score_mod, torch.zeros((), dtype=dtype)))
    found = _of_mask(block_mask, batch, heads, *sizes)
    if form.conditions:
        also = _graphs([replace(form.program, node=c) for c in form.conditions], batch, heads, *sizes)
        both = range(max(len(found), len(also))), range(max(len(found[0]), len(also[0])))
        found = [[_at(found, b, h) & _at(also, b, h) for h in both[1]] for b in both[0]]
    every_b, every_h = torch.arange(batch), torch.arange(heads)
    if scale is not None:
        check_scale(scale)
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    run = partial(_attend, query, key, value, form, scale, return_lse or (return_aux is not None and return_aux.lse))
    entries = [every_b] if len(found) == 1 else every_b.split(1)
    parts = [every_h] if len(found[0]) == 1 else every_h.split(1)
    rows = [[run(found[i][k], b, h) for k, h in enumerate(parts)] for i, b in enumerate(entries)]
    out, lse = (torch.cat([torch.cat([x[k] for x in row], 1) for row in rows]) for k in (0, 1))
    return _asked((out, lse), return_lse, return_aux)


def _asked(both: Any, return_lse: bool, return_aux: Any) -> Any:
    """Of a result and a log-sum-exp, what a call asks for."""
    out, lse = both
    if return_aux is not None:
        return out, of_torch.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _at(found: list[list[Graph]], b: int, h: int) -> Graph:
    row = found[b % len(found)]
    return row[h % len(row)]


def _check_device(device: Any) -> None:
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f'mpnn.flex runs on a CPU; got {device}: pass device="cpu", or use torch\'s on a GPU')


# ---------------------------------------------------------------------------------------------------- traced functions


class _Brackets(TorchFunctionMode):
    """Indexing by scalar tensors reads no number, so that it can be traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if type(args[1]) is tuple else (args[1],)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, (Tensor, int)) for i in index):
                return _aten.index(args[0], [torch.as_tensor(i) for i in index])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class _Program:
    """A traced function of (score,) b, h, q_idx and kv_idx, as far as one of its nodes, or a number."""

    module: GraphModule
    inputs: tuple[Node, ...]
    node: Any

    def depends_on(self) -> set[int]:
        """Which of b, h, q_idx and kv_idx the node depends on; -1 is the score."""
        return {k - len(self.inputs) + 4 for k, x in enumerate(self.inputs) if x in _ancestors(self.node)}

    def __call__(self, *at: Tensor) -> Tensor:
        """The number at scalars b, h, q_idx and kv_idx."""
        known: dict[Node, Any] = dict(zip(self.inputs[-4:], at, strict=True))

        def compute(node: Any) -> Any:
            if node not in known:
                args = torch.fx.map_arg((node.args, node.kwargs), compute)
                is_data = node.op == "get_attr"
                known[node] = getattr(self.module, node.target) if is_data else node.target(*args[0], **args[1])
            return known[node]

        return compute(self.node) if isinstance(self.node, Node) else torch.tensor(self.node, dtype=torch.float64)

    def over(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """The numbers for each b, each h and each pair (q, kv), [B, H, E], or 1 where they do not depend on them."""
        of = self.depends_on()
        b = b if _B in of else b[:1]
        h = h if _H in of else h[:1]
        q, kv = (q, kv) if of & {_Q, _KV} else (torch.zeros(1, dtype=torch.int64),) * 2
        if not len(q):  # no edge, which torch.vmap does not take
            return torch.zeros(len(b), len(h), 0)
        return _mapped(self, (_B,), (_H,), (_Q, _KV))(b, h, q, kv)

    def constant(self) -> float | None:
        """The number, if it depends on nothing and is not learned."""
        if self.depends_on():
            return None
        x = self(*[torch.zeros((), dtype=torch.int64)] * 4)
        return None if x.requires_grad or x.numel() != 1 else float(x)

    def at(self, node: Any) -> "_Program":
        return replace(self, node=node)

    def product(self, x: Any, y: Any) -> Any:
        is_node = isinstance(x, Node) or isinstance(y, Node)
        return self.module.graph.call_function(_aten.mul.Tensor, (x, y)) if is_node else x * y


def _trace(mod: Mod, *score: Tensor) -> _Program:
    name = "score_mod" if score else "mask_mod"
    ends = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    try:
        with _Brackets():
            module = make_fx(mod)(*score, *ends)
    except RuntimeError as error:
        raise ValueError(
            f"{name} must be a function of ({'score, ' if score else ''}b, h, q_idx, kv_idx) that reads no numbers, as "
            f"`if` and `item` do: {error}"
        ) from error
    nodes = list(module.graph.nodes)
    calls = [x.target for x in nodes if x.op == "call_function"]
    if wrong := [x for x in calls if x._schema.is_mutable or torch.Tag.nondeterministic_seeded in x.tags]:
        raise ValueError(f"{name} must not write to tensors or draw random numbers; it does so by {wrong[0]}")
    return _Program(module, tuple(x for x in nodes if x.op == "placeholder"), nodes[-1].args[0])


def _ancestors(node: Any) -> set[Node]:
    """The nodes whose numbers a node is computed from, itself included."""
    found = set[Node]()
    todo = [node] if isinstance(node, Node) else []
    while todo:
        last = todo.pop()
        found.add(last)
        todo += [] if getattr(last.target, "overloadpacket", None) in _LIKE else set(last.all_input_nodes) - found
    return found


_LIKE = (_aten.new_ones, _aten.new_zeros, _aten.new_full, _aten.ones_like, _aten.zeros_like, _aten.full_like)
"""Operations that read no numbers; torch's `and_masks` and `noop_mask` begin with one."""


def _mapped(function: Mod, *levels: tuple[int, ...]) -> Mod:
    """The function of four vectors, of which those of a level move together; the first level is the outer dimension."""
    for level in reversed(levels):
        function = torch.vmap(function, tuple(0 if k in level else None for k in range(4)))
    return function


# ---------------------------------------------------------------------------------------------------- masks


def _graphs(masks: list[_Program], batch: int, heads: int, num_dst: int, num_src: int) -> list[list[Graph]]:
    """The graph of all masks for each entry of the batch and each head, or for one if they do not depend on it."""
    of = set().union(*(mask.depends_on() for mask in masks))
    capacity.require(16 * (num_dst + num_src), f"a mask of Q_LEN={num_dst} and KV_LEN={num_src}", "use fewer nodes")
    evaluated = num_dst * num_src * (heads if _H in of else 1) * (batch if _B in of else 1)
    if evaluated > _MOST_PAIRS:
        raise ValueError(
            f"a mask_mod is evaluated for each pair, and {evaluated:,} are too many; build the graph by a topology of "
            "mpnn.graphs, and call ops.attend"
        )
    step = max(1, _PAIRS // max(num_src, 1))
    kv = torch.arange(num_src)

    def allowed(b: int, h: int, q: Tensor) -> Tensor:
        at = torch.tensor(b), torch.tensor(h), q, kv
        parts = [_mapped(mask, (_Q,), (_KV,))(*at) for mask in masks]
        if any(x.dtype != torch.bool or x.dim() != 2 for x in parts):
            raise ValueError(f"a mask_mod must return a boolean scalar; got {parts[0].dtype}")
        return reduce(and_, parts)

    def graph(b: int, h: int) -> Graph:
        runs = []
        for q in torch.arange(num_dst).split(step) if num_dst and num_src else ():
            some = Runs.from_dense(allowed(b, h, q).numpy())
            runs.append((some.row + int(q[0]), some.start, some.stop))
        return Graph.from_runs(Runs.of(num_dst, num_src, runs))

    return [[graph(b, h) for h in range(heads if _H in of else 1)] for b in range(batch if _B in of else 1)]


_OF_TORCH: "WeakKeyDictionary[Any, BlockMask]" = WeakKeyDictionary()


def _of_mask(mask: Any, batch: int, heads: int, num_dst: int, num_src: int) -> list[list[Graph]]:
    """The graphs of a block mask, this module's or torch's."""
    if mask is None:
        return [[graphs.complete().bind(num_dst, num_src)]]
    if not isinstance(mask, BlockMask):
        if not hasattr(mask, "mask_mod") or not hasattr(mask, "to_dense"):
            raise TypeError(f"block_mask must be of create_block_mask; got {type(mask).__name__}")
        known = _OF_TORCH.get(mask)
        if known is None or known.mask_mod is not mask.mask_mod:  # it may be assigned anew
            _OF_TORCH[mask] = known = _converted(mask)
        mask = known
    shape = mask.shape
    expected = (batch, heads, num_dst, num_src)
    shared = [shape[axis] == 1 and axis not in mask.depends_on for axis in (_B, _H)]
    if shape[2:] != expected[2:] or any(shape[x] != expected[x] and not shared[x] for x in (_B, _H)):
        hint = ": its mask_mod depends on b or h, so create_block_mask needs B and H" if mask.depends_on else ""
        raise ValueError(f"block_mask has the shape {shape}; expected {expected}{hint}")
    return mask.graphs


def _converted(mask: Any) -> BlockMask:
    """torch's block mask: what its mask_mod allows within its blocks."""
    blocks, (rows, columns), mask_mod = mask.to_dense().bool(), mask.BLOCK_SIZE, mask.mask_mod
    same = bool((blocks == blocks[:1, :1]).all())

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row = q // rows
        column = kv // columns
        return (blocks[0, 0, row, column] if same else blocks[b, h, row, column]) & mask_mod(b, h, q, kv)

    _check_device(blocks.device)
    program = _trace(within)
    return BlockMask(mask_mod, _graphs([program], *mask.shape), program.depends_on() & {_B, _H})


# ---------------------------------------------------------------------------------------------------- score_mods


@dataclass(frozen=True, eq=False)
class _Form:
    """factor * score, or factor * tanh(inner * score); then the biases, and -inf where a condition does not hold. Each
    is a number or a node of the program."""

    program: Any = None
    factor: Any = 1.0
    inner: Any = None
    biases: tuple[Any, ...] = ()
    conditions: tuple[Any, ...] = ()

    def times(self, number: Any) -> "_Form | None":
        if isinstance(number, _Form) or self.conditions:  # -inf times a number may be another one
            return None
        factor, *biases = (self.program.product(x, number) for x in (self.factor, *self.biases))
        return replace(self, factor=factor, biases=tuple(biases))

    def plus(self, number: Any) -> "_Form | None":
        if isinstance(number, _Form):
            return None
        if isinstance(number, Node) and number.target is _aten.where.self:
            condition, value, other = number.args
            if self.program.at(other).constant() == -inf:
                return replace(self, biases=(*self.biases, value), conditions=(*self.conditions, condition))
        return replace(self, biases=(*self.biases, number))


def _form(program: _Program) -> _Form:
    """The form of a score_mod."""
    forms: dict[Any, _Form] = {program.inputs[0]: _Form(program)}
    needed = _ancestors(program.node)  # not what autograd stores
    for node in list(program.module.graph.nodes):
        if node in needed and node.op == "call_function" and any(x in forms for x in node.all_input_nodes):
            operands = [forms.get(x, x) if isinstance(x, Node) else x for x in node.args]
            found = _operation(node.target, *operands, **node.kwargs)
            if found is None:
                raise ValueError(
                    f"mpnn.flex does not run this score_mod, because of {node.target}: it may add functions of (b, h, "
                    "q_idx, kv_idx), multiply by functions of (b, h, q_idx) or (b, h, kv_idx), apply c * tanh(score / c"
                    ") before it adds, and return -inf by torch.where; other scores are written as in mpnn.scores"
                )
            forms[node] = found
    if program.node not in forms:
        raise ValueError("score_mod must return a function of the score")
    return forms[program.node]


def _operation(target: Any, x: Any, y: Any = None, z: Any = None, **options: Any) -> _Form | None:
    """The form of an operation on forms, nodes and numbers; None if it has none."""
    form, other = (x, y) if isinstance(x, _Form) else (y, x)
    match str(target):
        case "aten.add.Tensor" if not options:
            return form.plus(other)
        case "aten.sub.Tensor" if not options and form is x:
            return None if isinstance(y, _Form) else form.plus(form.program.product(y, -1.0))
        case "aten.sub.Tensor" | "aten.rsub.Scalar" if not options:
            negative = form.times(-1.0)
            return negative and negative.plus(other)
        case "aten.mul.Tensor":
            return form.times(other)
        case "aten.div.Tensor" if form is x and not isinstance(y, _Form):
            is_node = isinstance(y, Node)
            return form.times(
                form.program.module.graph.call_function(_aten.reciprocal.default, (y,)) if is_node else 1 / y
            )
        case "aten.neg.default":
            return form.times(-1.0)
        case "aten.tanh.default" if not (form.biases or form.conditions or form.inner is not None):
            return replace(form, factor=1.0, inner=form.factor)
        case "aten.where.self" if not isinstance(x, _Form) and not (isinstance(y, _Form) and isinstance(z, _Form)):
            form, other = (y, z) if isinstance(y, _Form) else (z, y)
            if form.program.at(other).constant() == -inf:
                holds = x if form is y else form.program.module.graph.call_function(_aten.logical_not.default, (x,))
                return replace(form, conditions=(*form.conditions, holds))
        case "aten.clone.default":
            return form
        case "aten._to_copy.default" if options.get("dtype", torch.float64) in (torch.float32, torch.float64):
            return form
    return None


# ---------------------------------------------------------------------------------------------------- running


def _attend(
    query: Tensor, key: Tensor, value: Tensor, form: _Form, scale: float, lse: bool, graph: Graph, b: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Out [B, H, N, D_v] of some entries of the batch and some heads, and lse [B, H, N], or nothing in its place."""
    q, k, v = (x if len(b) == len(x) else x[b] for x in (query, key, value))
    if len(h) < query.shape[1]:
        shared = h // (query.shape[1] // key.shape[1])
        q = q[:, h]
        k = k[:, shared]
        v = v[:, shared]
    factor = form.factor
    softcap = None
    program = form.program
    if form.inner is not None:
        number = program.at(form.factor).constant()
        if not number:
            raise ValueError("score_mod may multiply a tanh by one number other than 0, without gradient")
        factor = program.product(form.inner, number)
        softcap = abs(number)
    if isinstance(factor, Node):
        q, k = _scaled(program.at(factor), q, k, b, h)
        factor = 1.0
    dtype = torch.promote_types(q.dtype, torch.float32)
    biases = tuple(_bias(program.at(x), graph, b, h, dtype) for x in form.biases)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = ops.attend(graph, q, k, v, bias=biases or None, scale=scale * factor, softcap=softcap, return_lse=lse)
    out, more = out if lse else (out, out.new_empty(*out.shape[:3]))
    return out.transpose(1, 2), more.transpose(1, 2)


def _scaled(number: _Program, q: Tensor, k: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, H, N, D], of which one is multiplied by numbers of its nodes."""
    of = number.depends_on()
    if {_Q, _KV} <= of:
        raise ValueError("mpnn.flex does not run a score_mod that multiplies by a function of both q_idx and kv_idx")
    if _KV not in of:
        at = torch.arange(q.shape[2])
        return q * number.over(b, h, at, at)[..., None].to(q.dtype), k
    at = torch.arange(k.shape[2])
    shared = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(shared, 1) * number.over(b, h, at, at)[..., None].to(k.dtype)


def _bias(number: _Program, graph: Graph, b: Tensor, h: Tensor, dtype: torch.dtype) -> PerEdge | NodeBias:
    """Numbers as a bias: of sources, of destinations, by offset, or per edge."""
    of = number.depends_on()

    def over(q: Tensor, kv: Tensor) -> Tensor:
        return number.over(b, h, q, kv).to(dtype).transpose(1, 2)  # [B, E, H]

    if not {_Q, _KV} <= of:
        size = graph.num_src if _KV in of else graph.num_dst
        numbers = over(torch.arange(size), torch.arange(size)).expand(len(b), size, -1)
        return NodeBias(src=numbers) if _KV in of else NodeBias(dst=numbers)
    if _B not in of and _is_by_offset(number) and graph.num_edges:
        runs = graph.runs
        least, most = int((runs.start - runs.row).min()), int((runs.stop - 1 - runs.row).max())
        clip = max(-least, most)
        offset = torch.arange(-clip, clip + 1).clamp(least, most)  # others have no edge
        return BiasTable(over((-offset).clamp(0), offset.clamp(0))[0], Offset(clip))
    src, dst = graph.edge_index
    return over(dst, src)


def _is_by_offset(number: _Program) -> bool:
    """Whether numbers depend on q_idx and kv_idx by their difference alone."""
    ends = set(number.inputs[-2:])
    users = [x for x in _ancestors(number.node) if ends & set(x.all_input_nodes)]
    return all(x.target is _aten.sub.Tensor and set(x.args) == ends and not x.kwargs for x in users)
