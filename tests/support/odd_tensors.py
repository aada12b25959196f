"""Each operation that reads tensors, called with tensors of one odd kind: a program, because a crash ends its process.

`python odd_tensors.py KIND...` prints a line for each operation and kind: that its result is the one of plain tensors,
or the sentence with which it was refused. `test_odd_tensors.py` reads the lines, and what the process ended with.
"""

import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from mpnn import MessagePassing, attention, graphs, ops, update
from mpnn.flex import create_block_mask, flex_attention
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.graphs.encodings import random_walk
from mpnn.kernels.dense import random_features
from mpnn.kernels.recurrent.convolution import short_convolution
from mpnn.kernels.recurrent.scan import linear_attention, recurrence
from mpnn.kernels.recurrent.selective import selective_scan
from mpnn.kernels.recurrent.state import state_update
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear

N, H, D = 24, 2, 8
LISTED = graphs.from_edges(torch.randint(N, (2, 90), generator=torch.Generator().manual_seed(1)), N)
BAND = graphs.window(3).bind(N)
CAUSAL = graphs.causal().bind(N)

Call = Callable[..., Any]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gates(*shape: int) -> Tensor:
    return -numbers(*shape, seed=9).abs() / 8


def layer(spec: nn.Module | None, graph: Any = LISTED, aggregate: Any = "sum", **options: Any) -> Call:
    """A layer whose parameters do not depend on what was drawn before."""
    operator = MessagePassing(graph, aggregate, options.pop("update", None), spec, **options)
    generator = torch.Generator().manual_seed(2)
    for p in operator.parameters():
        nn.init.normal_(p, std=0.3, generator=generator)
    return operator.requires_grad_(False)


def attends(graph: Any, *names: str, **options: Any) -> Call:
    def call(query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Any:
        return ops.attend(graph, query, key, value, **dict(zip(names, more, strict=True)), **options)

    return call


def with_dropout(query: Tensor, key: Tensor, value: Tensor, backend: str) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return ops.attend(BAND, query, key, value, dropout=0.5, backend=backend)


def edges_updated() -> Call:
    operator = layer(None, edges=update.EdgeUpdate(D, 6))
    return lambda x, e: operator(x, edge_attr=e)


def feature_dropout(x: Tensor) -> Tensor:
    """What is kept is doubled; which numbers are is random."""
    x = x.repeat(9000, 1)
    dropped = Dropout(0.5)(x)
    return torch.where(dropped == 0, 2 * x, dropped)[:N]


def linear_map(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    module = Linear(D, 512)
    del module.weight, module.bias
    module.weight, module.bias = weight, bias
    return module(x)


def flexible(query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device="cpu")
    return flex_attention(query, key, value, lambda s, b, h, i, j: s - (i - j) * slope[h], mask)


def in_place(name: str) -> Call:
    """A convolution of PyTorch Geometric in place."""
    import torch_geometric.nn as pyg

    from mpnn.pyg import use

    torch.manual_seed(6)
    model = {"GAT": partial(pyg.GATConv, D, 4, heads=H), "SAGE": partial(pyg.SAGEConv, D, 4, aggr="max")}[name]()
    use(model.requires_grad_(False))
    return model


def sampled(nodes: Tensor) -> Tensor:
    return graphs.compressed(LISTED).sample(nodes, 2)[0]


def state_of(state: Tensor, *tensors: Tensor) -> Tensor:
    return state_update(state.clone(), *tensors)


QKV = tuple(numbers(N, H, D, seed=s) for s in range(3))
BATCHED = tuple(x.expand(2, N, H, D).contiguous() for x in QKV)
X = numbers(N, D)
GATE, BETA = gates(N, H), numbers(N, H, seed=5).sigmoid()
MAMBA = (numbers(1, N, D), gates(1, N, D).neg(), gates(D, 4), numbers(1, N, 4, seed=7), numbers(1, N, 4, seed=8))
EDGE_BIAS = numbers(BAND.num_edges, H, seed=6)
LISTED_BIAS = numbers(LISTED.num_edges, H, seed=6)
KERNEL_BLOCKS = [0, N, 0, N, 1]

OPERATIONS: dict[str, tuple[Call, tuple[Tensor, ...]]] = {
    **{f"attend by {b}": (attends(BAND, backend=b), QKV) for b in ("auto", "csr", "tiles", "dense", "edge_list")},
    "attend along edges": (attends(LISTED), QKV),
    "attend, batched": (attends(CAUSAL), BATCHED),
    "attend, a bias of edges by csr": (attends(LISTED, "bias", backend="csr"), (*QKV, LISTED_BIAS)),
    "attend, a bias of edges by tiles": (attends(BAND, "bias", backend="tiles"), (*QKV, EDGE_BIAS)),
    **{
        f"attend, a table by {b}": (
            lambda q, k, v, table, b=b: ops.attend(BAND, q, k, v, bias=BiasTable(table, Offset(3)), backend=b),
            (*QKV, numbers(7, H)),
        )
        for b in ("csr", "tiles", "dense")
    },
    **{
        f"attend over destinations by {b}": (
            lambda q, k, v, d, s, b=b: ops.attend(
                BAND, q, k, v, bias=ops.NodeBias(dst=d, src=s), normalize="softmax_dst", backend=b
            ),
            (*QKV, numbers(N, H), numbers(N, H, seed=1)),
        )
        for b in ("csr", "tiles")
    },
    "attend with sinks": (attends(BAND, "sinks", softcap=5.0), (*QKV, numbers(H))),
    "attend, weights": (attends(LISTED, return_weights=True), QKV),
    "attend, lse": (attends(BAND, return_lse=True), QKV),
    "attend with dropout by csr": (partial(with_dropout, backend="csr"), QKV),
    "attend with dropout by tiles": (partial(with_dropout, backend="tiles"), QKV),
    "attend unnormalized": (attends(CAUSAL, normalize="none", backend="scan"), QKV),
    "retention": (attends(CAUSAL, "log_gate", normalize="none"), (*QKV, GATE)),
    "gates of features": (attends(CAUSAL, "log_gate", normalize="none"), (*QKV, gates(N, H, D))),
    "delta rule": (attends(CAUSAL, "beta", normalize="none"), (*QKV, BETA)),
    "gated delta rule, states": (
        attends(CAUSAL, "log_gate", "beta", "state", normalize="none", return_state=True),
        (*QKV, GATE, BETA, numbers(H, D, D)),
    ),
    "merge": (lambda *x: ops.merge([x[:2], x[2:]]), (QKV[0], GATE, QKV[1], BETA)),
    **{f"aggregate by {r}": (partial(ops.aggregate, LISTED, reduce=r), (X,)) for r in ("sum", "mean", "max", "var")},
    "aggregate with weights": (lambda x, w: ops.aggregate(LISTED, x, "sum", weight=w), (X, LISTED_BIAS[:, 0])),
    "aggregate with weights of features": (
        lambda x, w: ops.aggregate(LISTED, x, "max", weight=w),
        (X, numbers(LISTED.num_edges, D)),
    ),
    "GAT": (layer(attention.Additive(D, 4, heads=H)), (X,)),
    "GATv2": (layer(attention.AdditiveV2(D, 4, heads=H)), (X,)),
    "GAT with edges": (
        lambda x, e: layer(attention.Additive(D, 4, heads=H, edge_dim=3))(x, edge_attr=e),
        (X, numbers(LISTED.num_edges, 3)),
    ),
    "transformer": (layer(attention.DotProduct(D, H)), (X,)),
    "GCN": (layer(attention.Degree(D, 4)), (X,)),
    "Performer": (layer(attention.Kernel(D, H), CAUSAL), (X,)),
    "max": (layer(None, aggregate="max"), (X,)),
    "edges updated": (edges_updated(), (X, numbers(LISTED.num_edges, 6))),
    "recurrence": (recurrence, tuple(x[None] for x in (*QKV, GATE, BETA))),
    "linear attention": (
        lambda q, k, v: linear_attention(q, k, v, 1.0, KERNEL_BLOCKS),
        tuple(x[None, :, :, None] for x in QKV),
    ),
    "selective scan": (selective_scan, MAMBA),
    "selective scan, all": (
        lambda x, dt, a, b, c, s, z: selective_scan(x, dt, a, b, c, s, softplus=True, z=z),
        (*MAMBA, numbers(1, D, 4), numbers(1, N, D)),
    ),
    "state update": (
        state_of,
        (numbers(1, H, D, 4), numbers(1, H, D), gates(1, H).neg(), gates(H), numbers(1, 1, 4), numbers(1, 1, 4)),
    ),
    "short convolution": (short_convolution, (X, numbers(3, D))),
    "feature dropout": (feature_dropout, (X,)),
    "linear map": (linear_map, (numbers(64, D), numbers(512, D), numbers(512))),
    "positive features": (
        lambda x, w: random_features._PositiveFeatures.apply(x, w, lambda m: m.amax(-1, keepdim=True)),
        (X, numbers(16, D)),
    ),
    "flex": (flexible, (*(x.transpose(0, 1)[None] for x in QKV), numbers(H).abs())),
    "PyG's GAT in place": (in_place("GAT"), (X, LISTED.edge_index)),
    "PyG's SAGE in place": (in_place("SAGE"), (X, LISTED.edge_index)),
    "edges": (lambda e: ops.aggregate(graphs.from_edges(e, N), X), (LISTED.edge_index,)),
    "sample": (sampled, (torch.arange(5),)),
    "nearest": (lambda x: graphs.knn(x, 3).edge_index, (X,)),
    "radius": (lambda x: graphs.radius(x, 1.5).edge_index, (X[:, :3].contiguous(),)),
    "hashes": (lambda x: graphs.lsh(x, 4).edge_index, (X,)),
    "chosen": (lambda i: ops.aggregate(graphs.chosen(i, N), X), (LISTED.edge_index[0, :48].view(N, 2),)),
    "walks": (lambda x: random_walk(LISTED, 3) * x[:, :3], (X,)),
}


class Wrapper(Tensor):
    """A tensor without memory of its own, which computes with another one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, function(*args, **kwargs))


class Named(Tensor):
    """A subclass with memory."""


def fake(call: Call, *tensors: Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        call(*map(mode.from_tensor, tensors))


def fake_or_real(call: Call, *tensors: Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call(mode.from_tensor(tensors[0]), *tensors[1:])


def traced(call: Call, *tensors: Tensor, mode: str) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(call, tracing_mode=mode)(*tensors)(*tensors)


def distributed(x: Tensor) -> Tensor:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return distribute_tensor(x, init_device_mesh("cpu", (1,)))


def dual(call: Call, *tensors: Tensor) -> Any:
    with forward_ad.dual_level():
        return call(*(forward_ad.make_dual(x, torch.ones_like(x)) if x.is_floating_point() else x for x in tensors))


def mapped(call: Call, *tensors: Tensor) -> Any:
    return tree_map_only(Tensor, lambda x: x[0], torch.func.vmap(call, randomness="same")(*(x[None] for x in tensors)))


def gradients(call: Call, *tensors: Tensor, batch: bool = False, keep: bool = False) -> Any:
    """The results and their gradients, of an incoming gradient without strides, or of several at once."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    out = call(*(x.mul(1) if x.is_floating_point() else x for x in leaves))
    results = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor) and x.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    if not results:
        return out
    upstream = [torch.ones((), dtype=x.dtype).expand(3, *x.shape) for x in results]
    options = {"is_grads_batched": True} if batch else {"create_graph": keep}
    incoming = upstream if batch else [x[0] for x in upstream]
    found = torch.autograd.grad(results, wanted, incoming, allow_unused=True, **options)
    if batch:
        found = [x if x is None else x[0] for x in found]
    return [*results, *(x for x in found if x is not None)]


def misaligned(x: Tensor) -> Tensor:
    """At an odd address."""
    buffer = torch.zeros(x.nbytes + 1, dtype=torch.uint8)
    y = torch.frombuffer(buffer.numpy(), dtype=x.dtype, offset=1).view(x.shape)
    return y.copy_(x)


def spread(x: Tensor) -> Tensor:
    """Every second number of a larger tensor."""
    return x.repeat_interleave(2, -1)[..., ::2]


def reversed_layout(x: Tensor) -> Tensor:
    """The same numbers with strides in the other order."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


class Logged(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


Kind = Callable[..., Any]


def converted(convert: Callable[[Tensor], Any], floats: bool = True) -> Kind:
    """A kind that converts tensors; `floats`: only those of features."""

    def call(function: Call, *tensors: Tensor) -> Any:
        return function(*(convert(x) if x.is_floating_point() or not floats else x for x in tensors))

    return call


def inside(mode: Callable[[], AbstractContextManager[Any]]) -> Kind:
    def call(function: Call, *tensors: Tensor) -> Any:
        with mode():
            return function(*tensors)

    return call


def default_dtype(call: Call, *tensors: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return call(*tensors)
    finally:
        torch.set_default_dtype(torch.float32)


KINDS: dict[str, Kind] = {
    "plain": lambda call, *tensors: call(*tensors),
    "FakeTensor": fake,
    "FakeTensor beside real ones": fake_or_real,
    "make_fx": partial(traced, mode="real"),
    "make_fx, fake": partial(traced, mode="fake"),
    "make_fx, symbolic": partial(traced, mode="symbolic"),
    "wrapper": converted(Wrapper, floats=False),
    "DTensor": converted(distributed, floats=False),
    "functionalized": lambda call, *tensors: torch.func.functionalize(call)(*tensors),
    "functional": converted(torch._to_functional_tensor, floats=False),
    "in grad": lambda call, *tensors: torch.func.vjp(call, *tensors)[0],
    "in vmap": mapped,
    "in jvp": lambda call, *tensors: torch.func.jvp(call, tensors, tuple(map(torch.ones_like, tensors))),
    "in vmap of grad": lambda call, *tensors: mapped(lambda *x: torch.func.vjp(call, *x)[0], *tensors),
    "dual": dual,
    "gradients": gradients,
    "gradients to be differentiated": partial(gradients, keep=True),
    "batches of gradients": partial(gradients, batch=True),
    "subclass": converted(lambda x: x.as_subclass(Named), floats=False),
    "parameter": converted(nn.Parameter),
    "meta": converted(lambda x: x.to("meta"), floats=False),
    "sparse": converted(Tensor.to_sparse, floats=False),
    "sparse rows": converted(lambda x: x.flatten(1).to_sparse_csr() if x.dim() > 1 else x, floats=False),
    "mkldnn": converted(Tensor.to_mkldnn),
    "nested": converted(lambda x: torch.nested.nested_tensor(list(x)), floats=False),
    "jagged": converted(lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), floats=False),
    "quantized": converted(quantized),
    "complex": converted(lambda x: torch.complex(x, x).conj()),
    "imaginary part": converted(lambda x: torch.complex(x, -x).conj().imag),
    "negated": converted(negated),
    "bool": converted(Tensor.bool, floats=False),
    "integers": converted(Tensor.int, floats=False),
    "uint16": converted(lambda x: x.to(torch.uint16), floats=False),
    "float8": converted(lambda x: x.to(torch.float8_e4m3fn)),
    "float64": converted(Tensor.double),
    "expanded": converted(lambda x: x[:1].expand_as(x), floats=False),
    "overlapping": converted(lambda x: x.flatten().as_strided(x.shape, (1,) * x.dim())),
    "spread": converted(spread, floats=False),
    "other strides": converted(reversed_layout, floats=False),
    "misaligned": converted(misaligned, floats=False),
    "no rows": converted(lambda x: x[:0], floats=False),
    "no width": converted(lambda x: x[..., :0], floats=False),
    "one dimension": converted(Tensor.flatten, floats=False),
    "scalar": converted(lambda x: x.flatten()[0], floats=False),
    "more dimensions": converted(lambda x: x[None, None, None, None], floats=False),
    "array": converted(lambda x: x.numpy(), floats=False),
    "list": converted(Tensor.tolist, floats=False),
    "None": converted(lambda x: None, floats=False),
    "number": converted(lambda x: 1.5, floats=False),
    "text": converted(lambda x: "x", floats=False),
    "inference mode": inside(torch.inference_mode),
    "device meta": inside(lambda: torch.device("meta")),
    "dispatch mode": inside(Logged),
    "autocast": inside(lambda: torch.autocast("cpu")),
    "default dtype": default_dtype,
}
DIFFERENT = {
    *("expanded", "overlapping", "bool", "integers", "uint16", "float8", "autocast", "in jvp", "float64", "complex"),
    *("no rows", "no width", "None", "scalar", "one dimension"),
}
"""Kinds whose numbers differ from the plain ones: the same numbers in a plain tensor are the reference."""
RESHAPED = {"more dimensions"}
"""Kinds that have the plain numbers in another shape."""
BY_TORCH = {"linear map", "positive features", "PyG's SAGE in place"}
"""Operations that end in a product of torch, which multiplies by a meta tensor without an error."""


WITHOUT_MEMORY = {
    "FakeTensor",
    "wrapper",
    "DTensor",
    "functional",
    "freed",
    "meta",
    "sparse",
    "in vmap",
    "None",
    "text",
}
"""Kinds of which one tensor alone is tried, too: the others let a call come further."""
FROM_NUMBERS = {"edges", "sample", "nearest", "radius", "hashes", "chosen"}
"""Operations that read numbers by numpy, which torch fills with uninitialized memory for functional tensors."""


def cases(kind: str, call: Call, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Call, Sequence[Tensor]]]:
    """The call with all tensors odd, and with each of them alone."""
    yield "all", call, tensors
    for k in range(len(tensors) if len(tensors) > 1 and kind in WITHOUT_MEMORY else 0):

        def one(x: Any, k: int = k) -> Any:
            return call(*tensors[:k], x, *tensors[k + 1 :])

        yield f"tensor {k}", one, tensors[k : k + 1]


def plain_results(out: Any) -> list[Tensor] | None:
    """The tensors of a result, if they are readable."""
    found = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
    readable = all(x.layout == torch.strided and not x.is_meta and not x.is_nested for x in found)
    if not found or not readable:
        return None
    found = [x.inner if isinstance(x, Wrapper) else x for x in found]
    found = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]
    keys = [torch._C._dispatch_keys(x) for x in found]
    if any(k.has(torch._C.DispatchKey.Python) for k in keys) or any(map(torch._is_functional_tensor, found)):
        return None
    return [x.detach().resolve_neg().resolve_conj() for x in found]


def is_near(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        x.shape == y.shape
        and torch.allclose(x.to(torch.float64), y.to(torch.float64), rtol=1e-3, atol=1e-4, equal_nan=True)
        for x, y in zip(one, other, strict=True)
    )


def say(*words: object) -> None:
    print(*words, sep="\t", flush=True)


def main(kinds: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind, (name, (call, tensors)) in itertools.product(kinds, OPERATIONS.items()):
        if name in FROM_NUMBERS and kind in ("functional", "functionalized"):
            continue
        for which, one, odd in cases(kind, call, tensors):
            say("begin", kind, name, which)
            try:
                out = KINDS[kind](one, *(x.clone() for x in odd))
            except Exception as error:
                found = str(error)
                last = traceback.extract_tb(error.__traceback__)[-1]
                ours = f"{os.sep}mpnn{os.sep}" in last.filename
                where = f"{last.filename.rpartition('mpnn' + os.sep)[2]}:{last.lineno}" if ours else ""
                say("refused", kind, name, which, type(error).__name__, where, found.replace("\n", " ")[:400])
                continue
            results = plain_results(out)
            if results is None:
                say("unreadable", kind, name, which)
            elif kind in DIFFERENT or (kind == "meta" and name in BY_TORCH):
                say("some result", kind, name, which)
            else:
                reference = plain_results(gradients(one, *odd)) if "gradients" in kind else REFERENCES[name]
                if kind in RESHAPED:
                    results, reference = ([x.flatten() for x in found or []] for found in (results, reference))
                say("equal" if is_near(results, reference or []) else "WRONG", kind, name, which)
        # No call may leave anything behind that later calls read.
        say("begin", kind, name, "after")
        first = plain_results(call(*tensors)) or []
        say("equal" if is_near(first, REFERENCES[name]) else "WRONG", kind, name, "after")
    say("end")


if __name__ == "__main__":
    REFERENCES = {name: plain_results(call(*tensors)) or [] for name, (call, tensors) in OPERATIONS.items()}
    main(sys.argv[1:] or list(KINDS))
