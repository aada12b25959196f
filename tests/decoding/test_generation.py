"""Generation draws what it says it draws, from what the full pass says."""

from __future__ import annotations

import pytest
import torch

from mpnn.decoding.generation import generate, nucleus
from mpnn.graphs import bigbird, causal, strided, window
from mpnn.models import GPT

LOGITS = torch.tensor([0.4, 0.1, 0.3, 0.15, 0.05]).log()
GRAPHS = (causal(), causal() & window(3), strided(3), causal() & bigbird(block=4, window=1, random=1, globals=1))


def fixed(tokens, cache=None):
    """A model that always says the same."""
    return LOGITS.expand(*tokens.shape, -1)


def model(graph=causal(), **options) -> GPT:  # noqa: B008  a topology is immutable
    made = GPT(11, 16, 4, 2, graph, **{"context": 24, **options})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.eval()


def shares(**options) -> torch.Tensor:
    """How often each token is drawn, of 4,000."""
    start = torch.zeros(4000, 1, dtype=torch.int64)
    drawn = generate(fixed, start, 1, generator=torch.Generator().manual_seed(0), **options)[:, -1]
    return torch.bincount(drawn, minlength=5) / 4000


# ------------------------------------------------------------------------------------------------ what is drawn


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.1, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.1, 0.3, 0.15, 0.05]),
        ({"top_p": 0.65}, [4 / 7, 0, 3 / 7, 0, 0]),  # 0.4 is too little, 0.4 + 0.3 enough
        ({"top_p": 0.71}, [0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"top_p": 1.0}, [0.4, 0.1, 0.3, 0.15, 0.05]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 0, 3 / 7, 0, 0]),  # of the three, 0.4 is 0.47
        ({"temperature": 0.5}, [0.16 / 0.285, 0.01 / 0.285, 0.09 / 0.285, 0.0225 / 0.285, 0.0025 / 0.285]),
        ({"temperature": 0.5, "top_p": 0.55}, [1, 0, 0, 0, 0]),  # at this temperature 0.4 has become 0.56
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_shares_of_the_draws(options, expected):
    expected, found = torch.tensor(expected), shares(**options)
    assert not found[expected == 0].any()
    deviation = (expected * (1 - expected) / 4000).sqrt()
    assert ((found - expected).abs() <= 4 * deviation + 1e-7).all()


def test_equally_likely_tokens_count_in_their_order():
    assert nucleus(torch.zeros(1, 4), 0.5).tolist() == [[True, True, False, False]]


def test_a_generator_repeats_the_draws():
    prompt, drawing = torch.randint(11, (2, 3)), model()
    draws = [
        drawing.generate(prompt, 12, top_k=6, top_p=0.9, generator=torch.Generator().manual_seed(s)).tolist()
        for s in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


# ------------------------------------------------------------------------------------------------ cached or not


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_greedy_steps_are_the_choices_of_the_full_pass(graph):
    drawing = model(graph).double()
    out = drawing.generate(torch.randint(11, (3, 4)), 20, temperature=0)
    assert torch.equal(drawing(out)[:, 3:-1].argmax(-1), out[:, 4:])


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_beyond_the_context_each_step_reads_the_last_tokens_anew(graph):
    drawing = model(graph, context=8).double()
    out = drawing.generate(torch.randint(11, (2, 5)), 12, temperature=0)
    for stop in range(8, 17):
        assert torch.equal(drawing(out[:, stop - 8 : stop])[:, -1].argmax(-1), out[:, stop])


def test_each_token_is_computed_once():
    seen, drawing = [], model(causal() & window(3))
    drawing.layers[0].register_forward_hook(lambda module, given, out: seen.append(out.shape[1]))
    drawing.generate(torch.randint(11, (2, 5)), 6)
    assert seen == [5, 1, 1, 1, 1, 1]


# ------------------------------------------------------------------------------------------------ where it ends


def test_a_sequence_that_has_ended_stays_so_and_generation_ends_with_the_last():
    answers = iter([[3, 1], [4, 3], [4, 4], [4, 4]])

    def scripted(tokens, cache=None):
        return torch.nn.functional.one_hot(torch.tensor(next(answers)), 5).float()[:, None]

    found = generate(scripted, torch.zeros(2, 1, dtype=torch.int64), 4, temperature=0, eos=3)
    assert found.tolist() == [[0, 3, 3], [0, 1, 3]]


def test_no_steps_give_the_prompt_back():
    prompt = torch.randint(11, (2, 3))
    assert torch.equal(model().generate(prompt, 0), prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]; got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\]; got 1.5"),
        ({"top_k": 0}, "top_k at least 1; got 1.0 and 0"),
        ({"steps": -1}, "steps must be at least 0; got -1"),
    ],
    ids=str,
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        generate(fixed, torch.zeros(1, 1, dtype=torch.int64), **{"steps": 1, **options})
