"""Attention specs and relative positions against their formulas, written out in plain float64, and against torch."""

import math
from collections.abc import Callable

import pytest
import torch
from threads import same_bits
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import MessagePassing, graphs
from mpnn.attention import AdditiveV2, Degree, DotProduct, Typed, degree_weights
from mpnn.data import neighbor_batches
from mpnn.graph import Graph
from mpnn.graph.relations import Offset
from mpnn.position import T5, ALiBi, EdgeBias, Rotary, Shaw, Table

DIM, HEADS, HEAD = 8, 2, 4
N = 7


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def nothing(i: int, j: int) -> Tensor:
    return torch.zeros(HEAD, dtype=torch.float64)


def by_formula(
    spec: DotProduct,
    x: Tensor,
    graph: Graph,
    score: Callable[[Tensor, Tensor, int, int, int], Tensor],
    on_value: Callable[[int, int], Tensor] = nothing,
) -> Tensor:
    """`W_O || _h sum_j softmax_j(score(q_i, k_j, i, j, h)) (v_j + on_value(i, j))`, one pair at a time."""
    query, key, value = (m(x).unflatten(-1, (-1, HEAD)) for m in (spec.to_query, spec.to_key, spec.to_value))
    share = HEADS // key.shape[-2]
    mask = graph.dense().tolist()
    out = torch.zeros(len(x), HEADS, HEAD, dtype=torch.float64)
    for i in range(len(x)):
        sources = [j for j in range(len(x)) if mask[i][j]]
        for h in range(HEADS):
            scores = torch.stack([score(query[i, h], key[j, h // share], i, j, h) for j in sources])
            values = torch.stack([value[j, h // share] + on_value(i, j) for j in sources])
            out[i, h] = scores.softmax(0) @ values
    return spec.to_out(out.flatten(-2))


def plain(q: Tensor, k: Tensor, *_: int) -> Tensor:
    return q @ k / math.sqrt(HEAD)


def check(spec: DotProduct, score: Callable[..., Tensor], on_value: Callable[[int, int], Tensor] = nothing) -> None:
    spec = spec.double()
    for topology in (graphs.complete(), graphs.causal(), graphs.window(2), graphs.permutation(range(N - 1, -1, -1))):
        x = rand(N, DIM)
        expected = by_formula(spec, x, topology.bind(N), score, on_value)
        torch.testing.assert_close(MessagePassing(topology, "sum", None, spec)(x), expected)


# ---------------------------------------------------------------------------------------- dot products


def test_grouped_heads() -> None:
    check(DotProduct(DIM, HEADS, kv_heads=1), plain)


def test_softcap() -> None:
    check(DotProduct(DIM, HEADS, softcap=0.3), lambda q, k, *_: 0.3 * torch.tanh(plain(q, k) / 0.3))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torchs_multihead_attention(causal: bool, bias: bool) -> None:
    torchs = nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True).double()
    ours = DotProduct(DIM, HEADS, bias=bias).double()
    copy_weights(torchs, ours)
    x, mask = rand(3, N, DIM), nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    expected, expected_weights = torchs(x, x, x, attn_mask=mask if causal else None, average_attn_weights=False)
    op = MessagePassing(graphs.causal() if causal else graphs.complete(), "sum", None, ours)
    out, weights = op(x, return_weights=True)
    torch.testing.assert_close(out, expected)
    src, dst = op.graph.bind(N).edge_index
    torch.testing.assert_close(weights, expected_weights[..., dst, src].transpose(1, 2))


def test_cross_attention_equals_torchs() -> None:
    torchs = nn.MultiheadAttention(DIM, HEADS, kdim=5, vdim=5, batch_first=True).double()
    ours = DotProduct(DIM, HEADS, source_dim=5).double()
    copy_weights(torchs, ours)
    x, source = rand(3, 4, DIM), rand(3, 9, 5)
    out = MessagePassing(graphs.complete(), "sum", None, ours)(x, source=source)
    torch.testing.assert_close(out, torchs(x, source, source, need_weights=False)[0])


def copy_weights(torchs: nn.MultiheadAttention, ours: DotProduct) -> None:
    together = torchs.in_proj_weight is not None
    weights = torchs.in_proj_weight.chunk(3) if together else [getattr(torchs, f"{n}_proj_weight") for n in "qkv"]
    with torch.no_grad():
        for k, linear in enumerate((ours.to_query, ours.to_key, ours.to_value)):
            linear.weight.copy_(weights[k])
            if linear.bias is not None:
                linear.bias.copy_(torch.nn.init.normal_(torchs.in_proj_bias.chunk(3)[k]))
        ours.to_out.load_state_dict(torchs.out_proj.state_dict())


# ---------------------------------------------------------------------------------------- positions


def test_rotary_rotates_pairs_by_the_position() -> None:
    def turned(x: Tensor, at: int) -> Tensor:
        pairs = torch.complex(x[: HEAD // 2], x[HEAD // 2 :])
        angles = torch.tensor([at * 100.0 ** (-2 * k / HEAD) for k in range(HEAD // 2)], dtype=torch.float64)
        z = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag])

    spec = DotProduct(DIM, HEADS, position=Rotary(HEAD, base=100.0))
    check(spec, lambda q, k, i, j, h: plain(turned(q, i), turned(k, j)))


def test_rotary_angles_do_not_suffer_from_half_precision() -> None:
    position = Rotary(HEAD).bfloat16()
    x = torch.ones(5000, 1, HEAD, dtype=torch.float64)
    turned, _ = position.rotate(x, x, graphs.identity().bind(5000))
    slow = 4999 * 10000.0**-0.5
    torch.testing.assert_close(float(turned[-1, 0, 1]), math.cos(slow) - math.sin(slow))


def test_alibi() -> None:
    slopes = [1 / 2**4, 1 / 2**8]
    check(DotProduct(DIM, HEADS, position=ALiBi(HEADS)), lambda q, k, i, j, h: plain(q, k) - slopes[h] * abs(i - j))


def test_several_positions_add_up() -> None:
    table = Table(HEADS, Offset(1)).double()
    nn.init.normal_(table.table)
    check(
        DotProduct(DIM, HEADS, position=[ALiBi(HEADS), table]),
        lambda q, k, i, j, h: plain(q, k) - abs(i - j) / 16 ** (h + 1) + table.table[max(-1, min(1, j - i)) + 1, h],
    )


def test_edge_bias() -> None:
    edges = torch.tensor([[3, 0, 1, 2, 0, 3], [0, 1, 0, 3, 2, 3]])
    attr = rand(6, 3)
    spec = DotProduct(DIM, HEADS, position=EdgeBias(3, HEADS)).double()
    number = {(int(i), int(j)): attr[e] for e, (j, i) in enumerate(edges.T)}
    graph, x = graphs.from_edges(edges, 4, edge_attr=attr), rand(4, DIM)
    expected = by_formula(
        spec, x, graph, lambda q, k, i, j, h: plain(q, k) + spec.positions[0].to_bias(number[i, j])[h]
    )
    torch.testing.assert_close(MessagePassing(graph, "sum", None, spec)(x), expected)


def test_edge_bias_takes_one_number_an_edge_without_an_axis_for_it() -> None:
    graph, attr = graphs.from_edges([[3, 0, 1], [0, 1, 0]], 4), rand(3)
    bias = EdgeBias(1, HEADS).double()
    assert torch.equal(bias.bias(graph, attr), bias.bias(graph, attr[:, None]))
    with pytest.raises(ValueError, match=r"EdgeBias has edge_dim=2; got edge_attr \[3\]"):
        EdgeBias(2, HEADS).bias(graph, attr)


@pytest.mark.parametrize("position", [Rotary(HEAD), ALiBi(HEADS), Shaw(HEAD, 2), T5(HEADS, 8, 6)], ids=type)
def test_positions_of_a_cached_segment_precede_those_of_the_current_one(position: nn.Module) -> None:
    spec = DotProduct(DIM, HEADS, position=position).double()
    x = rand(5, DIM)
    whole = MessagePassing(graphs.causal(), "sum", None, spec)(x)
    segment = MessagePassing(graphs.memory(3), "sum", None, spec)(x[3:], source=x)
    torch.testing.assert_close(segment, whole[3:])


# ---------------------------------------------------------------------------------------- the other specs


def test_bahdanau() -> None:
    spec = AdditiveV2(DIM, 6, activation=torch.tanh, source_dim=5).double()
    x, source = rand(3, DIM), rand(4, 5)
    out, weights = MessagePassing(graphs.complete(), "sum", None, spec)(x, source=source, return_weights=True)
    keys = spec.to_value(source)
    for i in range(3):
        energy = torch.stack([spec.vector[0] @ torch.tanh(spec.to_query(x[i]) + keys[j]) for j in range(4)])
        torch.testing.assert_close(weights[4 * i : 4 * i + 4, 0], energy.softmax(0))
        torch.testing.assert_close(out[i], energy.softmax(0) @ keys + spec.bias)


def test_gradients_of_degree_weights_are_the_same_bits_on_any_number_of_threads() -> None:
    graph, given, up = graphs.from_edges(torch.randint(50, (2, 100_000)), 50), torch.rand(100_000), torch.randn(100_000)
    weight = given.requires_grad_()
    assert same_bits(lambda: torch.autograd.grad(degree_weights(graph, weight), weight, up), 1, 2, 3)


def test_degree_weights_by_hand() -> None:
    # 1 and 2 attend to 0; 0 attends to 1 twice; 3 has neither in- nor out-neighbors.
    graph = graphs.from_edges(torch.tensor([[0, 0, 1, 1], [1, 2, 0, 0]]), 4)
    half = 0.5**0.5
    torch.testing.assert_close(degree_weights(graph), torch.tensor([half, half, half, half]))
    weighted = degree_weights(graph, torch.tensor([4.0, 1.0, 0.5, 0.5]))
    torch.testing.assert_close(weighted, torch.tensor([2.0, 1.0, 0.25, 0.25]))


def test_degrees_of_signed_weights_sum_their_sizes() -> None:
    """Also those that a sampled graph carries; a weight of 0 has the derivative that it has beside positive ones."""
    edges, weight = torch.randint(9, (2, 40)), torch.randn(40, dtype=torch.float64)
    degree = torch.zeros(9, dtype=torch.float64).index_add(0, edges[1], weight.abs())
    expected = weight * (degree[edges[1]] * degree[edges[0]]) ** -0.5
    expected[(degree[edges[1]] == 0) | (degree[edges[0]] == 0)] = 0
    graph = graphs.from_edges(edges, 9, edge_attr=weight)
    torch.testing.assert_close(degree_weights(graph, weight), expected)
    (batch,) = neighbor_batches(graph, torch.arange(9), [-1], batch_size=9, shuffle=False)
    torch.testing.assert_close(batch.graphs[0].degrees[0], degree[batch.nodes])
    pair = graphs.from_edges([[0, 1, 1], [1, 0, 0]], 2)
    of = [
        torch.autograd.functional.jacobian(lambda w: degree_weights(pair, w), torch.tensor([1.0, 1.0, z]))
        for z in (0.0, 1e-6)
    ]
    torch.testing.assert_close(*of, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_degrees_are_counted_past_what_short_numbers_count_to(dtype: torch.dtype) -> None:
    """In bfloat16 256 + 1 is 256, so that a hub of 1,000 neighbors would count as one of 256."""
    rim = torch.arange(1, 1001)
    star = torch.stack([rim, torch.zeros_like(rim)])
    graph = graphs.from_edges(torch.cat([star, star.flip(0)], 1), 1001)
    op = MessagePassing(graph, "sum", None, Degree(1, 1, bias=False)).to(dtype)
    nn.init.ones_(op.attention.to_value.weight)
    y = op(torch.ones(1001, 1, dtype=dtype))[1]  # one edge, of weight 1 / sqrt(1000)
    torch.testing.assert_close(y.double(), torch.tensor([1000**-0.5]).double(), rtol=torch.finfo(dtype).eps, atol=0)


def test_degree_takes_one_weight_an_edge() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1], [1, 0]]), 2, edge_attr=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"one weight per edge as edge_attr, \[2\]; got \[2, 3\]"):
        MessagePassing(graph, "sum", None, Degree(4, 4))(torch.ones(2, 4))


def test_convolution_is_a_neighborhood_with_one_map_for_each_offset() -> None:
    for height, width, radius in ((5, 7, 1), (6, 4, 2), (1, 1, 1)):
        side = 2 * radius + 1
        spec = Typed(3, 5, relations=side**2).double()
        nn.init.normal_(spec.bias)
        image = rand(2, 3, height, width)
        kernel = spec.weight.unflatten(0, (side, side)).permute(3, 2, 0, 1)
        expected = F.conv2d(image, kernel, spec.bias, padding=radius)
        op = MessagePassing(graphs.neighborhood(height, width, radius), "sum", None, spec)
        torch.testing.assert_close(op(image.flatten(2).mT).mT.unflatten(-1, (height, width)), expected)


def test_degree_wants_one_set_of_nodes() -> None:
    with pytest.raises(ValueError, match="one set of nodes; the graph is 2 x 3"):
        MessagePassing(graphs.complete(), "sum", None, Degree(4, 4))(torch.ones(2, 4), source=torch.ones(3, 4))


def test_typed_wants_classes_and_enough_maps() -> None:
    x = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"needs a graph with edge types.*pass edge_type"):
        MessagePassing(graphs.causal(), "sum", None, Typed(3, 3, relations=2))(x)
    with pytest.raises(ValueError, match="has 9 edge types, but this layer has 2 maps"):
        MessagePassing(graphs.neighborhood(2, 2, 1), "sum", None, Typed(3, 3, relations=2))(x)
