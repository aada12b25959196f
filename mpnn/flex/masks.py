"""Block masks: conditions on indices as graphs, this library's and torch's.

The graphs of a mask are those of its function as it is in a call: a tensor that the function reads may change, in
place too. The function is recorded in each call (`programs.py`), and its graphs are made again if it differs.

Of sequences of different lengths, in jagged tensors, each has a mask by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mpnn import graphs
from mpnn.flex.pairs import allowed
from mpnn.flex.programs import B, H, Mod, Node, Program, Witness, check_constant, record
from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import at_least, check_form
from mpnn.graphs.jagged import is_jagged, lengths_of, like, values_of

Sizes = tuple[int, int, int, int]
"""The batch, the heads, and the lengths of queries and of keys."""


class _Made(NamedTuple):
    """The graphs of a function, as `BlockMask.graphs` and `BlockMask.depends_on` return them."""

    witness: Witness
    graphs: list[list[Graph]]
    depends_on: frozenset[int]


class BlockMask:
    """A mask_mod as graphs, made by `create_block_mask`. A mask_mod that reads tensors has other graphs when these
    change; another function may be assigned to `mask_mod`.

    Attributes:
        mask_mod: the function.
        shape: (B, H, Q_LEN, KV_LEN); B and H are 1 where the mask does not depend on them.
    """

    def __init__(self, mask_mod: Mod, sizes: Sizes) -> None:
        self.mask_mod = mask_mod
        self._sizes = sizes
        self._made: _Made | None = None
        self._current()

    @property
    def graphs(self) -> list[list[Graph]]:
        """`graphs[b][h]`, with one entry where the mask does not depend on the batch or the head."""
        return self._current().graphs

    @property
    def depends_on(self) -> frozenset[int]:
        """Holds 0 if the mask depends on b, and 1 if it depends on h."""
        return self._current().depends_on

    @property
    def shape(self) -> Sizes:
        made = self._current().graphs
        return len(made), len(made[0]), *self._sizes[2:]

    def _current(self) -> _Made:
        """The graphs of the function as it is now: those that are known, if it computes what it did."""
        known = self._made
        program = record(self.mask_mod)
        if known is not None and known.witness.agrees(program):
            return known
        check_constant(program, self.mask_mod, self._sizes)
        depends_on = frozenset(program.depends_on() & {B, H})
        # One assignment, so that other threads see either of both.
        made = self._made = _Made(Witness.of(program), graphs_of(program, *self._sizes), depends_on)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The function and the sizes; a copy makes its graphs again."""
        return {**vars(self), "_made": None}


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
    """Returns the graph of a mask_mod, as `torch.nn.attention.flex_attention.create_block_mask`.

    Blocks of pairs are decided by bounds of the mask_mod: of `document_id[q_idx] == document_id[kv_idx]`,
    `q_idx >= kv_idx`, `q_idx - kv_idx < w`, tables of blocks, and what `&`, `|`, `~` and `where` make of them, few
    pairs are computed. Other functions are computed for all pairs.

    Args:
        mask_mod: a function of (b, h, q_idx, kv_idx), int64 scalars, that returns whether q_idx attends to kv_idx. It
            is evaluated for each batch entry and each head if it depends on them, for one if not. Tensors that it
            captures may change between calls.
        B, H: size of the batch and number of heads; None is 1.
        device: None or "cpu". BLOCK_SIZE, _compile: no effect, because tiles follow from runs, for any length.

    Raises:
        ValueError: mask_mod is not such a function, or `device` is another one.
        TypeError: a size is not an integer.
    """
    check_device(device)
    batch, heads = at_least("B", 1 if B is None else B, 0), at_least("H", 1 if H is None else H, 0)
    num_dst, num_src = at_least("Q_LEN", Q_LEN, 0), at_least("KV_LEN", KV_LEN, 0)
    return BlockMask(mask_mod, (batch or 1, heads or 1, num_dst, num_src))


def check_device(device: Any) -> None:
    """Raises ValueError unless a device is None or a CPU."""
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f'mpnn.flex runs on a CPU; got {device}: pass device="cpu", or use torch\'s on a GPU')


def graphs_of(program: Program, batch: int, heads: int, num_dst: int, num_src: int) -> list[list[Graph]]:
    """Returns the graph of a condition for each entry of the batch and each head, or for one if it does not depend on
    it.

    Raises:
        ValueError: the program returns no condition.
    """
    returned = program.node.result if isinstance(program.node, Node) else program.node
    check_form("a mask_mod must return a boolean scalar", returned, "bool", ())
    of = program.depends_on()
    capacity.require(16 * (num_dst + num_src), f"a mask of Q_LEN={num_dst} and KV_LEN={num_src}", "use fewer nodes")
    entries = range(batch if B in of else 1)
    return [
        [Graph.from_runs(allowed(program, b, h, num_dst, num_src)) for h in range(heads if H in of else 1)]
        for b in entries
    ]


# ---------------------------------------------------------------------------------------- masks of a call


def of_mask(mask: Any, batch: int, heads: int, num_dst: int, num_src: int) -> list[list[Graph]]:
    """Returns the graphs of a block mask, of this module or of torch, with its present values."""
    if mask is None:
        return [[graphs.complete().bind(num_dst, num_src)]]
    if hasattr(mask, "mask_mod") and hasattr(mask, "kv_num_blocks"):
        mask = _of_torch(mask)
    if not isinstance(mask, BlockMask):
        raise TypeError(f"block_mask must be of create_block_mask; got {type(mask).__name__}")
    made = mask._current()
    shape = len(made.graphs), len(made.graphs[0]), *mask._sizes[2:]
    expected = (batch, heads, num_dst, num_src)
    shared = [shape[axis] == 1 and axis not in made.depends_on for axis in (B, H)]
    if shape[2:] != expected[2:] or any(shape[x] != expected[x] and not shared[x] for x in (B, H)):
        hint = ": its mask_mod depends on b or h, so create_block_mask needs B and H" if made.depends_on else ""
        raise ValueError(f"block_mask has the shape {shape}; expected {expected}{hint}")
    return made.graphs


_OF_TORCH: "WeakKeyDictionary[Any, BlockMask]" = WeakKeyDictionary()


def _of_torch(mask: Any) -> BlockMask:
    """Torch's block mask as one of this module. As in torch's kernel, its blocks are those that it lists: all pairs of
    full blocks, the pairs of partial blocks that mask_mod allows, and no others."""
    *leading, num_dst, num_src = mask.shape
    sizes = (*[1] * (2 - len(leading)), *leading, num_dst, num_src)
    within = _within(mask, sizes)
    known = _OF_TORCH.get(mask)
    if known is None or known._sizes != sizes:
        known = _OF_TORCH[mask] = BlockMask(within, sizes)
    known.mask_mod = within
    return known


def _within(mask: Any, sizes: Sizes) -> Mod:
    """The condition that torch's block mask computes."""
    check_device(mask.kv_num_blocks.device)
    rows, columns = mask.BLOCK_SIZE
    partial = _listed(mask.kv_num_blocks, mask.kv_indices)
    has_full = mask.full_kv_num_blocks is not None
    full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices) if has_full else torch.zeros_like(partial)
    if partial.shape[-2] * rows < sizes[2] or partial.shape[-1] * columns < sizes[3]:
        raise ValueError(
            f"block_mask has {partial.shape[-2]} x {partial.shape[-1]} blocks of {rows} x {columns} pairs, too few for "
            f"{sizes[2]} queries and {sizes[3]} keys"
        )
    mask_mod = mask.mask_mod
    # A table that is the same for all entries and heads does not depend on them.
    tables = [x[0, 0] if bool((x == x[:1, :1]).all()) else x for x in (full, partial)]

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row = q // rows
        column = kv // columns
        is_full, is_partial = (x[row, column] if x.dim() == 2 else x[b, h, row, column] for x in tables)
        return is_full | (is_partial & mask_mod(b, h, q, kv))

    return within


def _listed(count: Tensor, indices: Tensor) -> Tensor:
    """Whether each block is listed, bool [B, H, rows, columns], from the numbers of each row [..., rows] and its
    columns [..., rows, columns], of which those beyond the number mean nothing."""
    leading = (1,) * (4 - indices.dim())
    indices = indices.reshape(*leading, *indices.shape)
    count = count.reshape(*leading, *count.shape)
    columns = indices.shape[-1]
    is_listed = torch.arange(columns) < count[..., None]
    # The others are written to one more column, which is left out.
    at = torch.where(is_listed, indices, columns).long()
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool)
    return table.scatter_(-1, at, True)[..., :-1]


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
    """Returns the graphs of a mask_mod over jagged queries and keys [B, H, j, D], as torch's function of this name up
    to 2.9.

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
    check_device(x.device)
    if not is_jagged(x) or x._ragged_idx != 2:  # type: ignore[attr-defined]  # of jagged tensors alone
        raise ValueError(f"{name} must be jagged, [B, H, j, D], as the other tensors are; got {list(x.shape)}")
    return values_of(name, x.transpose(1, 2)).split(lengths_of(x))


def _of_sequence(mod: Mod, number: int) -> Mod:
    """A mod with the number of a sequence in the place of b."""

    def shifted(*at: Any) -> Tensor:
        *score, b, h, q_idx, kv_idx = at
        return mod(*score, b + number, h, q_idx, kv_idx)

    return shifted


def over_sequences(
    attend: Callable[..., Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    score_mod: Any,
    block_mask: Any,
    options: dict[str, Any],
) -> Any:
    """Returns `flex_attention` of each sequence; the result and the log-sum-exp are jagged."""
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
        out, lse = attend(q, key, value, mod, mask, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0].transpose(0, 1))
    return tuple(like(torch.cat(x), qkv[0]).transpose(1, 2) for x in (outs, sums))
