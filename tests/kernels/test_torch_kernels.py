"""What torch's kernels for CUDA are given: where sequences laid end to end begin."""

import torch

<<<<<<< HEAD
from mpnn import engine, graphs
from mpnn.backends.tiles import cpu, cuda
from mpnn.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.kernels import flex, varlen
from mpnn.needs import missing
from mpnn.round import Round
from mpnn.scores import Dot

# Unfused on purpose: compiled, it takes half a minute.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")

TOPOLOGIES = {
    "complete": graphs.complete(),
    "causal": graphs.causal(),
    "window": graphs.window(130),
    "dilated": graphs.window(3, dilation=50),
    "longformer": graphs.longformer(40, globals=2),
    "bigbird": graphs.bigbird(block=16, window=3, random=2, globals=1),
    "causal bigbird": graphs.causal() & graphs.bigbird(block=16, window=3, random=1, globals=1),
    "no self-loops": graphs.causal() - graphs.identity(),
    "documents": graphs.documents([100, 1, 200]),
}


def asked(graph, width=8, heads=2, key_heads=2, batch=(), **options):
    def features(nodes, h):
        return torch.randn(*batch, nodes, h, width, dtype=torch.float64)

    score = Dot(features(graph.num_dst, heads), features(graph.num_src, key_heads), 0.3)
    return Round(graph, features(graph.num_src, key_heads), score, **options)


def unfused(request):
    """What `cuda.run` computes, without compiling it."""
    score = request.score
    query, key, value = (x.flatten(0, -4) if x.dim() > 3 else x[None] for x in (score.query, score.key, request.value))
    mask = cuda.blocks(request.graph)
    out = flex.attention(query, key, value, cpu.table(request), score.softcap, score.scale, mask, compiled=False)
    return out.view(*request.batch, *out.shape[1:])


def assert_agrees(request):
    with torch.no_grad():
        torch.testing.assert_close(unfused(request), engine.run(request, "edge_list")[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_the_mask_hears_exactly_the_edges(topology):
    graph = topology.bind(301)
    assert_agrees(asked(graph))


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_blocks_are_empty_partial_or_full_as_the_edges_say(topology):
    graph = topology.bind(301)
    mask, side = cuda.blocks(graph), flex.SIDE
    edges = torch.zeros(3 * side, 3 * side, dtype=torch.bool)
    edges[:301, :301] = graph.dense()
    tiles = edges.unflatten(1, (3, side)).unflatten(0, (3, side)).transpose(1, 2).flatten(2)  # [row, column, pairs]
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(2))
    full = torch.zeros(3, 3, dtype=torch.bool)
    for row, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        full[row, mask.full_kv_indices[0, 0, row, :count].long()] = True
    inside = edges.clone()
    inside[301:] = True  # destinations beyond the graph are ignored
    inside = inside.unflatten(1, (3, side)).unflatten(0, (3, side)).transpose(1, 2).flatten(2)
    assert torch.equal(full, inside.all(2) & tiles.any(2))


def test_rectangular_graphs_batches_and_grouped_heads():
    assert_agrees(asked(graphs.complete().bind(5, 140), batch=(3,)))
    assert_agrees(asked(graphs.memory(20).bind(130), heads=4, key_heads=2, batch=(2, 1)))


def test_biases_by_offset_and_soft_capping():
    graph = (graphs.causal() & graphs.window(50)).bind(140)
    table = torch.randn(2 * 7 + 1, 2, dtype=torch.float64)
    request = asked(graph, bias=(BiasTable(table, Offset(7)),))
    assert_agrees(request)
    assert_agrees(replace(request, bias=(), score=replace(request.score, softcap=2.0)))
    remembered = graphs.memory(10).bind(50)
    assert_agrees(asked(remembered, bias=(BiasTable(table, Offset(7)),)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dropout": 0.1}, "no dropout"),
        ({"graph": graphs.strided(8).bind(301)}, "rows? has .* runs, and on CUDA it compares at most 16"),
        ({"bias": (torch.zeros(301 * 301, 2),)}, "only biases by offset j - i"),
        ({"graph": (graphs.causal() - graphs.causal()).bind(301)}, "has no edges"),
    ],
)
def test_what_it_cannot_do_it_refuses(changes, sentence):
    request = asked(graphs.complete().bind(301))
    request, on_device = replace(request, value=request.value.float()), {"cpu", "float64"}  # nothing runs here
    serves = cuda.SERVES | on_device
    assert (missing(request, serves, cuda.REASONS) or cuda.refusal(request)) is None
    changed = replace(request, **changes)
    assert re.search(sentence, missing(changed, serves, cuda.REASONS) or cuda.refusal(changed))


@pytest.mark.slow
def test_one_program_serves_all_topologies_and_lengths():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    flex._compiled.cache_clear()
    counters.clear()
    for n in (256, 301, 500):
        for topology in (graphs.window(130), graphs.causal(), graphs.documents([100, n - 100])):
            with torch.no_grad():  # FlexAttention has no backward pass on CPU
                request = asked(topology.bind(n), width=16)
                request = replace(
                    request,
                    value=request.value.float(),
                    score=replace(request.score, query=request.score.query.float(), key=request.score.key.float()),
                )
                expected = engine.run(request, "edge_list")[0]
                torch.testing.assert_close(cuda.run(request)[0], expected, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 2
=======
from mpnn.kernels import varlen
>>>>>>> 8aaf3d0 (Attention over tiles of runs on CUDA by Triton kernels, in place of FlexAttention)


def test_groups_laid_end_to_end_begin_where_the_last_one_ends():
    sizes = torch.tensor([2, 3])
    assert varlen.starts(sizes, 1).tolist() == [0, 2, 5]
    assert varlen.starts(sizes, 2).tolist() == [0, 2, 5, 7, 10]
    assert varlen.starts(sizes, 1).dtype == torch.int32
    on_cpu = torch.zeros(5, 2, 8, dtype=torch.bfloat16)
    assert not varlen.runs_here(on_cpu, on_cpu)
