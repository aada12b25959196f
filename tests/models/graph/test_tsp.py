"""The attention model for the travelling salesman: its equations, its gradient, and its authors' weights and figure."""

from itertools import permutations

import pytest
import torch
from error_bound import error_bound
from parity import moved, same_gradients
from published_tours import cities as published_cities, published_model, tsp_weights

from mpnn import data
from mpnn.models.graph.tsp import TSP, tour_length

SYSTEM = "travelling salesman attention model"
EXACT = error_bound(3, 32, torch.float64)
BOUND = error_bound(3, 32)


def small(dtype=torch.float64, scale=0.3):
    return moved(TSP(dim=16, heads=4, layers=2, hidden=24).to(dtype), scale)


def real(load):
    pytest.importorskip("safetensors")
    try:
        return load()
    except data.DatasetNotFound as error:
        pytest.skip(str(error))


def normed(x, norm):
    return (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias


def attend(query, keys, values, heads):
    """One destination's message of several heads (eq. 12 to 15), before W_O: [dim]."""
    out = []
    for q, k, v in zip(query.chunk(heads), keys.chunk(heads, 1), values.chunk(heads, 1), strict=True):
        weight = torch.stack([torch.dot(q, row) for row in k]) / len(q) ** 0.5
        out.append(weight.exp() / weight.exp().sum() @ v)
    return torch.cat(out)


def formula(model, points, tour):
    """log p(tour) of one instance, and the greedy choice at each of its steps: Kool et al. 2019, node by node."""
    h = points @ model.embed.weight.T + model.embed.bias
    for layer in model.layers:
        a, u = layer.attention, layer.update
        keys, values = h @ a.to_key.weight.T, h @ a.to_value.weight.T
        messages = torch.stack([a.to_out.weight @ attend(a.to_query.weight @ x, keys, values, a.heads) for x in h])
        h = normed(h + messages, u.norm)  # eq. 2
        wide = (h @ u.ffn[0].weight.T + u.ffn[0].bias).clamp(min=0)
        h = normed(h + wide @ u.ffn[3].weight.T + u.ffn[3].bias, u.ffn_norm)  # eq. 3
    a, total, greedy = model.glimpse.attention, 0.0, []
    for t, city in enumerate(tour):
        left = [j for j in range(len(points)) if j not in tour[:t]]
        before = model.nowhere if t == 0 else torch.cat([h[tour[0]], h[tour[t - 1]]])
        query = a.to_query.weight @ torch.cat([h.mean(0), before])  # eq. 4
        glimpse = attend(query, h[left] @ a.to_key.weight.T, h[left] @ a.to_value.weight.T, a.heads)
        scores = torch.stack([torch.dot(a.to_out.weight @ glimpse, model.to_key.weight @ h[j]) for j in left])
        p = (10 * (scores / h.shape[1] ** 0.5).tanh()).exp()  # eq. 7
        p = p / p.sum()  # eq. 8
        total = total + p[left.index(city)].log()
        greedy.append(left[int(p.argmax())])
    return total, greedy


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equals_the_formula(count, measured):
    for dtype in (torch.float64, torch.float32):
        model, cities = small(dtype, scale=0.15), torch.rand(3, count, 2, dtype=dtype)
        tours = torch.stack([torch.randperm(count) for _ in range(3)])
        found, exact = model(cities, tours), model.double()
        expected = torch.stack([formula(exact, x.double(), t.tolist())[0] for x, t in zip(cities, tours, strict=True)])
        error = (found - expected).abs().max().item()
        measured(SYSTEM, "formula", error, EXACT if dtype == torch.float64 else BOUND)


def test_gradients_equal_the_formulas():
    model, cities, tours = small(), torch.rand(2, 6, 2).double(), torch.stack([torch.randperm(6) for _ in range(2)])
    expected = sum(formula(model, x, t.tolist())[0] for x, t in zip(cities, tours, strict=True))
    same_gradients(model, model(cities, tours).sum(), expected, EXACT)


def test_greedy_tours_take_the_likeliest_city_at_each_step():
    model, cities = small(), torch.rand(4, 8, 2).double()
    for x, tour in zip(cities, model.solve(cities).tolist(), strict=True):
        assert sorted(tour) == list(range(8))
        assert formula(model, x, tour)[1] == tour


def test_probabilities_of_all_tours_add_up_to_one_and_are_how_often_they_are_drawn():
    model, cities = small(), torch.rand(1, 4, 2).double()
    tours = torch.tensor(list(permutations(range(4))))
    p = model(cities.expand(24, -1, -1), tours).exp()
    torch.testing.assert_close(p.sum(), torch.ones_like(p.sum()))
    drawn = model.sample(cities.expand(1000, -1, -1), torch.Generator().manual_seed(0))
    often = (drawn[:, None] == tours).all(2).double().mean(0)
    assert ((often - p).abs() <= 5 * (p * (1 - p) / 1000).sqrt() + 1e-9).all()  # five standard errors


def test_loss_weighs_drawn_tours_by_how_much_shorter_they_are_than_the_baselines():
    model, baseline, cities = small(scale=0.1), small(), torch.rand(6, 5, 2).double()
    found = model.loss(cities, baseline, torch.Generator().manual_seed(0))
    tours = model.sample(cities, torch.Generator().manual_seed(0))
    longer = tour_length(cities, tours) - tour_length(cities, baseline.solve(cities))
    expected = (longer * model(cities, tours)).mean()
    torch.testing.assert_close(found, expected)
    (a, b) = (torch.autograd.grad(loss, model.embed.weight)[0] for loss in (found, expected))
    torch.testing.assert_close(a, b)
    assert a.abs().max() > 0


def test_length_of_a_round_tour():
    square = torch.tensor([[[0.0, 0], [1, 1], [1, 0], [0, 1]]])
    assert tour_length(square, torch.tensor([[0, 2, 1, 3]])).item() == 4
    assert tour_length(square, torch.tensor([[0, 1, 2, 3]])).item() == pytest.approx(2 + 2 * 2**0.5)


def test_training_moves_the_running_statistics_once_a_step():
    model, cities = small().train(), torch.rand(5, 6, 2).double()
    model.loss(cities, small()).backward()
    assert model.layers[0].update.norm.num_batches_tracked == 1


# the standard deviation of lengths over instances, measured on the 10,000
SPREAD = 0.31


def test_published_weights_find_short_tours():
    model, cities = published_model(real(tsp_weights)), published_cities(300)
    mean = tour_length(cities, model.solve(cities)).mean().item()
    assert abs(mean - 3.847) < 4 * SPREAD / 300**0.5


@pytest.mark.slow
def test_published_weights_reach_the_published_length(measured):
    model = published_model(real(tsp_weights))
    lengths = torch.cat([tour_length(cities, model.solve(cities)) for cities in published_cities().split(1000)])
    measured(SYSTEM, "published greedy tour 3.8470", abs(lengths.double().mean().item() - 3.8470), 1e-3)
    assert abs(lengths.std().item() - SPREAD) < 0.01


def test_instances_are_the_first_of_the_published_ones():
    assert torch.equal(published_cities(3), published_cities(50)[:3])
    assert published_cities(2).dtype == torch.float32
    assert published_cities(1)[0, 0].tolist() == pytest.approx([0.1915194503788923, 0.6221087710398319])


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match=r"cities must be points \[B, N, 2\] with B and N at least 1; got \[5, 2\]"):
        TSP(dim=8, heads=2, layers=1).solve(torch.rand(5, 2))
    with pytest.raises(ValueError, match="not the weights of an attention model for the TSP: 'embedder"):
        published_model({})
