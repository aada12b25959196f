"""The union law: f(A + B) = f(A) + f(B). What a node computes depends on its in-neighbors, and on nothing beside them.

Each case computes two members side by side, changes one of them, and expects that the other does not change. Cases are
those of the registries: requests of the operator and backends, ready models, families of transformers and wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from capabilities import REQUESTS
from every_model import GRAPHS, ROWS, World
from threads import threads
from torch import Tensor

from mpnn import Graph, MessagePassing, attention, deterministic_batches, engine, graphs
from mpnn.backends import dense, registered
from mpnn.engine.plan import Refused
from mpnn.kernels.cpu import library
from mpnn.round import Round

# ------------------------------------------------------------------------------------------- requests x backends

FIRST, SECOND = 9, 14


def _two_graphs(crossing: int = 0) -> Graph:
    """Two graphs side by side, whose numbers of nodes and edges differ from all widths."""
    random = torch.Generator().manual_seed(0)
    ends = [torch.randint(0, n, (2, 4 * n), generator=random) for n in (FIRST, SECOND)]
    ends[1] += FIRST
    between = torch.tensor([[FIRST + 1], [0]]).expand(2, crossing)
    edges = torch.cat([*ends, between], 1).unique(dim=1)
    return graphs.from_edges(edges, FIRST + SECOND)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a request."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, Graph):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _change_second(round: Round) -> None:
    """Other numbers for the nodes and edges of the second graph, in place."""
    of_edges = round.graph.edge_index[1] >= FIRST
    of_nodes = torch.arange(FIRST + SECOND) >= FIRST
    for tensor in _tensors(round):
        for dim, size in enumerate(tensor.shape):
            if tensor.is_floating_point() and size in (len(of_nodes), len(of_edges)):
                is_second = of_nodes if size == len(of_nodes) else of_edges
                shape = [1] * tensor.dim()
                shape[dim] = size
                with torch.no_grad():
                    tensor.copy_(torch.where(is_second.view(shape), tensor.cos() * 2 + 1, tensor))


def _change_of_first(make: Callable[[Graph], Round], graph: Graph, backend: Any) -> float:
    """How far results of the first graph move when the second changes, of the largest; NaN if the backend refuses."""
    torch.manual_seed(0)
    round = make(graph)
    try:
        before = engine.run(round, backend.NAME)[0].detach().clone()
    except Refused:
        return float("nan")
    _change_second(round)
    after = engine.run(round, backend.NAME)[0].detach()
    dim = next(dim for dim, size in enumerate(before.shape) if size == FIRST + SECOND)
    assert not torch.equal(before, after), "nothing of the second graph has changed"
    first, moved = before.narrow(dim, 0, FIRST), after.narrow(dim, 0, FIRST)
    return float((first - moved).abs().max() / first.abs().max())


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name: str) -> None:
    served = 0
    for backend in registered():
        change = _change_of_first(REQUESTS[name], _two_graphs(), backend)
        served += change == change
        assert not change > 1e-12, backend.NAME
    assert served


def test_an_edge_between_the_graphs_is_noticed() -> None:
    for backend in registered():
        change = _change_of_first(REQUESTS["dot product"], _two_graphs(crossing=1), backend)
        assert not change <= 1e-12, backend.NAME


# ---------------------------------------------------------------------------------------------------------- bits

_MEMBERS = FIRST, SECOND


def _placed(round: Round, graph: Graph, sizes: tuple[int, int], edges: tuple[int, int]) -> Round:
    """The round with its second graph before the first one, over `graph`."""

    def swap(x: Tensor, *_: Any) -> Tensor:
        for dim, size in enumerate(x.shape):
            for first, second in (sizes, edges):
                if size == first + second:
                    x = torch.cat([x.narrow(dim, first, second), x.narrow(dim, 0, first)], dim)
                    break
        return x

    return round.map(swap).with_fields(graph=graph)


def _members_and_swapped(kind: str) -> tuple[Graph, Graph, tuple[int, int]]:
    """Two members side by side, the second before the first, and the numbers of edges of each."""
    if kind == "edges":
        graph = _two_graphs()
        src, dst = graph.edge_index
        is_first = dst < FIRST
        moved = torch.stack([src, dst]) + torch.where(is_first, SECOND, -FIRST)
        order = torch.cat([(~is_first).nonzero()[:, 0], is_first.nonzero()[:, 0]])
        count = int(is_first.sum())
        assert bool(is_first[:count].all())
        return graph, graphs.from_edges(moved[:, order], FIRST + SECOND), (count, len(dst) - count)
    within = graphs.causal() if kind == "causal documents" else graphs.complete()
    both = [(graphs.documents(sizes) & within).bind(FIRST + SECOND) for sizes in (_MEMBERS, _MEMBERS[::-1])]
    counts = [n * (n + 1) // 2 if kind == "causal documents" else n * n for n in _MEMBERS]
    return both[0], both[1], (counts[0], counts[1])


as_measured = pytest.mark.skipif(
    library.processor() != "x86_64_v3", reason="torch's products were measured with AVX2 (docs/limits.md)"
)

_OF_THE_GRAPH = {"aggregation: pna"}
"""Its scalers are relative to the mean degree of the whole graph."""


@as_measured
@pytest.mark.parametrize("kind", ["edges", "documents", "causal documents"])
@pytest.mark.sample(3)
def test_bits_of_requests_do_not_depend_on_the_place(kind: str) -> None:
    """Each member has the bits that it has at another place, by each backend and by the plan."""
    graph, swapped, edges = _members_and_swapped(kind)
    served, moved = 0, []
    for name, make in REQUESTS.items():
        torch.manual_seed(0)
        round = make(graph)
        if round.dropout or round.graph is not graph or round.graph.relation is not None:
            continue  # dropout depends on the numbers of nodes
        if name in _OF_THE_GRAPH:
            continue
        for backend in ("edge_list", *(b.NAME for b in registered() if b.NAME != "edge_list"), "auto"):
            other = _placed(round, swapped, _MEMBERS, edges)
            try:
                before, after = (engine.run(x, backend)[0].detach() for x in (round, other))
            except Refused:
                continue
            dim = next(dim for dim, size in enumerate(before.shape) if size == sum(_MEMBERS))
            back = torch.cat([after.narrow(dim, SECOND, FIRST), after.narrow(dim, 0, SECOND)], dim)
            if float((back - before).abs().max()) > 1e-9:
                break  # it depends on the numbers of nodes, by the specification too
            served += 1
            # `dense` with data of edges is a matrix of all pairs, whose sums depend on where the edges lie
            is_matrix = backend == "dense" and (kind == "edges" or not dense.runs_by_cliques(round))
            if not back.equal(before) and not is_matrix:
                moved.append((name, backend, float((back - before).abs().max())))
    assert served > 100
    assert not moved


def _batch_of_graphs(order: list[int]) -> tuple[Graph, list[int]]:
    """Graphs of 3 to 40 nodes and one with a hub of more edges than a piece of a row, in an order."""
    sizes = [3, 17, 2000, 40, 8, 29]
    parts = []
    for k in order:
        random = torch.Generator().manual_seed(k)
        edges = torch.randint(sizes[k], (2, 5 * sizes[k]), generator=random)
        if sizes[k] == 2000:
            hub = torch.stack([torch.arange(2000), torch.zeros(2000, dtype=torch.int64)])
            edges = torch.cat([edges, hub], 1)
        parts.append(graphs.from_edges(edges, sizes[k]))
    return graphs.batch(parts), [sizes[k] for k in order]


_LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "GAT": lambda: MessagePassing(None, "sum", None, attention.Additive(24, 16, heads=4)),
    "GATv2": lambda: MessagePassing(None, "sum", None, attention.AdditiveV2(24, 16, heads=4)),
    "GCN": lambda: MessagePassing(None, "sum", None, attention.Degree(24, 24)),
    "transformer": lambda: MessagePassing(None, "sum", None, attention.DotProduct(24, 4)),
    **{name: lambda name=name: MessagePassing(None, name) for name in ("sum", "mean", "max", "var")},  # type: ignore[misc]
}


@as_measured
@pytest.mark.parametrize("name", _LAYERS)
def test_bits_of_graphs_in_batches(name: str) -> None:
    """In any order, beside some of the others, alone, on one thread and on two, by the plan."""
    torch.manual_seed(0)
    op = _LAYERS[name]()
    x = {k: torch.randn(size, 24) for k, size in enumerate(_batch_of_graphs(list(range(6)))[1])}

    def results(order: list[int]) -> dict[int, Tensor]:
        graph, sizes = _batch_of_graphs(order)
        with torch.no_grad():
            out = op(torch.cat([x[k] for k in order]), graph=graph)
        return dict(zip(order, out.split(sizes), strict=True))

    expected = results([0, 1, 2, 3, 4, 5])
    for count in (1, 2):
        with threads(count):
            for order in ([5, 4, 3, 2, 1, 0], [4, 2], [0, 3, 5], [2], [1], [3]):
                for k, found in results(order).items():
                    # torch's product of 3 rows is another one than that of many
                    assert found.equal(expected[k]) or order == [0], (count, order, k)


_BY_GRAPH = {"GraphBert": "each graph is padded to the largest of the batch"}


@as_measured
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.sample(2)
def test_bits_of_models_of_graphs(name: str) -> None:
    if name in _BY_GRAPH:
        pytest.skip(_BY_GRAPH[name])
    entry, random, sizes = GRAPHS[name], torch.Generator().manual_seed(1), (5, 14, 8)
    torch.manual_seed(0)
    model = entry.make().eval()
    world = World.draw(random, sizes, 3)
    owner = {"nodes": world.of_node, "edges": world.of_edge, "graphs": torch.arange(len(sizes))}
    with torch.no_grad(), deterministic_batches():
        together = entry.call(model, world)
        for k in range(len(sizes)):
            alone = entry.call(model, world.alone(k))
            for kind, out in together.items():
                if len(out) == len(owner[kind]):
                    assert out[owner[kind] == k].equal(alone[kind]), (kind, k)


# --------------------------------------------------------------------------------------------------- ready models


@pytest.mark.parametrize("name", GRAPHS)
def test_models_of_graphs(name: str) -> None:
    entry, random = GRAPHS[name], torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = entry.make().double().eval()
    world = World.draw(random, (5, 8), 3).to(torch.float64)
    with torch.no_grad():
        before = entry.call(model, world)
        world.x[5:] = world.x[5:].cos() + 1
        world.attr[world.of_edge == 1] *= 0.5
        after = entry.call(model, world)
    owner = {"nodes": world.of_node, "edges": world.of_edge, "graphs": torch.arange(2)}
    for kind, out in before.items():
        first = owner[kind] == 0 if len(out) == len(owner[kind]) else slice(0, 0)
        torch.testing.assert_close(after[kind][first], out[first], rtol=0, atol=1e-12 * float(out.abs().max()))


@pytest.mark.parametrize("name", ROWS)
def test_models_of_rows(name: str) -> None:
    entry = ROWS[name]
    torch.manual_seed(0)
    model = entry.make().double().eval()
    rows = [x.double() if x.is_floating_point() else x for x in entry.draw(torch.Generator().manual_seed(2), 3)]
    with torch.no_grad():
        before = entry.call(model, *rows)
        for x in rows:
            if x.dtype != torch.bool and x.dim() > 1:
                x[1:] = x[1:].cos() if x.is_floating_point() else x[1:].flip(-1)
        after = entry.call(model, *rows)
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=1e-12 * float(before.abs().max()))


# --------------------------------------------------------------------------------------------- families in place

transformers = pytest.importorskip("transformers")

import company  # noqa: E402
import packed_texts  # noqa: E402

import mpnn.hf  # noqa: E402
from mpnn.integrations.hf import compat, unpadded  # noqa: E402

packs = pytest.mark.skipif(compat.IS_OLDER, reason="older transformers do not tell all layers where texts begin")

_QUICK = [
    ("granitemoehybrid", "position_ids", "FSDP"), ("mamba2", "seq_idx", "FSDP"),
    ("mamba2", "seq_idx", "plain"), ("mamba2", "position_ids", ".forward"), ("mamba2", "position_ids", "inner model"),
    ("mamba2", "position_ids", "checkpoint wrapper"), ("qwen3_next", "seq_idx", "checkpointed"),
    ("qwen3_next", "position_ids", "checkpointed, reentrant"), ("granitemoehybrid", "position_ids", "plain"),
    ("granitemoehybrid", "seq_idx", "training"), ("gpt_oss", "position_ids", "PEFT"), ("zaya", "seq_idx", "autocast"),
    ("recurrent_gemma", "position_ids", "plain"), ("gpt2", "seq_idx", "plain"),
    pytest.param("lfm2", "position_ids", "compiled", marks=pytest.mark.slow),
]  # fmt: skip
_RECURRENT = (
    "afmoe", "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "gpt_oss", "granitemoehybrid", "jamba",
    "kimi_linear", "lfm2", "llama", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "zamba", "zamba2", "zaya",
)  # fmt: skip


# A third of all pairs, told in turn in one way or the other: each family under several wrappers, each wrapper around
# several families.
_PAIRS = [
    (family, wrapper, ("position_ids", "seq_idx")[(i + j) // 3 % 2])
    for i, family in enumerate(_RECURRENT)
    for j, wrapper in enumerate(packed_texts.WRAPPERS)
    if (i + j) % 3 == 0
]


def _change(family: str, way: str, wrapper: str) -> float:
    made = packed_texts.model(company.class_of(family))
    return packed_texts.WRAPPERS[wrapper](made, way)


@packs
@pytest.mark.parametrize(("family", "way", "wrapper"), _QUICK)
def test_packed_texts(family: str, way: str, wrapper: str) -> None:
    assert _change(family, way, wrapper) <= company.bar(family)


@packs
@pytest.mark.slow
@pytest.mark.parametrize(("family", "wrapper", "way"), _PAIRS)
def test_packed_texts_under_each_wrapper(family: str, wrapper: str, way: str) -> None:
    try:
        change = _change(family, way, wrapper)
    except ValueError as error:
        if "incompatible with Mamba-based models" not in str(error):
            raise
        pytest.skip("PEFT refuses the layers of this family")
    assert change <= company.bar(family)


@packs
@pytest.mark.slow
def test_packed_texts_of_each_family_are_as_the_page_says() -> None:
    answers = {family: company.by_way(family) for family in company.families()}
    page = (packed_texts.ROOT / "docs" / "families.md").read_text()
    assert company.table(answers) in page, "run python tests/support/company.py"


@pytest.mark.parametrize("family", ["albert", "bert"])
def test_encoders_without_padding(family: str) -> None:
    import encoder_walk

    model = next(model for name, model in encoder_walk.families() if name == family)
    assert encoder_walk.difference(encoder_walk.tiny(model)) <= 1e-5


def _same_bits(compute: Callable[[list[Tensor]], list[Tensor]], longest: int = 40) -> None:
    """Whether texts have their bits in any order, beside some of the others and alone, where there are 12 tokens or
    more, on one thread and on two."""
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 50, (n,), generator=random) for n in (4, 21, 12, longest, 33, 21)]
    expected = compute(texts)
    for count in (1, 2):
        with threads(count):
            for order in ([5, 4, 3, 2, 1, 0], [2, 0, 4], [3, 1], [1], [2], [3]):
                for k, found in zip(order, compute([texts[k] for k in order]), strict=True):
                    assert found.equal(expected[k]), (count, order, k)


def _in_place(kind: Any, family: str, **options: Any) -> Any:
    """A small model with heads of 16: torch's attention with heads of 8 depends on the number of threads."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 60}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}  # of families that have them
    torch.manual_seed(0)
    made = kind.from_config(transformers.AutoConfig.for_model(family, **sizes)).eval()
    mpnn.hf.use(made, **options)
    return made


@as_measured
@pytest.mark.parametrize("family", ["bert", "electra", pytest.param("modernbert", marks=pytest.mark.slow)])
def test_bits_of_texts_in_batches(family: str) -> None:
    made = _in_place(transformers.AutoModel, family, unpad=True)

    def compute(texts: list[Tensor]) -> list[Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        keep = torch.arange(ids.shape[1]) < torch.tensor([[len(text)] for text in texts])
        with torch.no_grad():
            states = made(input_ids=ids, attention_mask=keep.long()).last_hidden_state
        return [row[: len(text)] for row, text in zip(states, texts, strict=True)]

    _same_bits(compute)


@packs
@as_measured
@pytest.mark.parametrize("family", ["llama", "gpt2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_bits_of_packed_texts(family: str) -> None:
    made = _in_place(transformers.AutoModelForCausalLM, family)

    def compute(texts: list[Tensor]) -> list[Tensor]:
        positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
        with torch.no_grad():
            logits = made(torch.cat(texts)[None], position_ids=positions, use_cache=False).logits[0]
        return list(logits.split([len(text) for text in texts]))

    _same_bits(compute, longest=300)


@pytest.mark.slow
def test_encoders_without_padding_are_those_whose_texts_stay_apart() -> None:
    import encoder_walk

    apart = {family for family, answer, _ in encoder_walk.walk() if answer == encoder_walk.APART}
    assert apart - unpadded.PROVEN <= {"doge"}  # a decoder
    assert apart >= unpadded.PROVEN
