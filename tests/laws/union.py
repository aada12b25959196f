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
from torch import Tensor

from mpnn import Graph, engine, graphs
from mpnn.backends import registered
from mpnn.engine.plan import Refused
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

from mpnn.integrations.hf import compat, unpadded  # noqa: E402

packs = pytest.mark.skipif(compat.IS_OLDER, reason="older transformers do not tell all layers where texts begin")

_QUICK = [
    ("mamba2", "seq_idx", "plain"), ("mamba2", "position_ids", ".forward"), ("mamba2", "position_ids", "inner model"),
    ("mamba2", "position_ids", "checkpoint wrapper"), ("qwen3_next", "seq_idx", "checkpointed"),
    ("qwen3_next", "position_ids", "checkpointed, reentrant"), ("granitemoehybrid", "position_ids", "plain"),
    ("granitemoehybrid", "seq_idx", "training"), ("gpt_oss", "position_ids", "PEFT"), ("zaya", "seq_idx", "autocast"),
    ("recurrent_gemma", "position_ids", "plain"), ("lfm2", "position_ids", "compiled"), ("gpt2", "seq_idx", "plain"),
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
    page = (packed_texts.ROOT / "docs" / "integrations.md").read_text()
    assert company.table(answers) in page, "run python tests/support/company.py"


@pytest.mark.parametrize("family", ["albert", "bert"])
def test_encoders_without_padding(family: str) -> None:
    import encoder_walk

    model = next(model for name, model in encoder_walk.families() if name == family)
    assert encoder_walk.difference(encoder_walk.tiny(model)) <= 1e-5


@pytest.mark.slow
def test_encoders_without_padding_are_those_whose_texts_stay_apart() -> None:
    import encoder_walk

    apart = {family for family, answer, _ in encoder_walk.walk() if answer == encoder_walk.APART}
    assert apart - unpadded.PROVEN <= {"doge"}  # a decoder
    assert apart >= unpadded.PROVEN
