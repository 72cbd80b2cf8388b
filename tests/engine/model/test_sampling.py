"""Sampling: draws follow temperature, top-k, top-p and seed, and mistakes are refused."""

import pytest
import torch

from kvtier.engine.model.sampling import Sampler, SamplingParams

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBABILITIES.log()


def draw(num_tokens, logits=LOGITS, **params):
    sampler = Sampler(SamplingParams(**params))
    return [sampler.sample(logits) for _ in range(num_tokens)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": -1},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": "half a pair \ud800"},
        {"stop": ["a", b"b"]},
        {"top_k": 2.5},
        {"logprobs": 1.5},
        {"max_tokens": float("inf")},
    ],
)
def test_a_parameter_out_of_range_is_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is .*; "):
        SamplingParams(**wrong)


def test_stop_takes_one_string_or_several():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_temperature_zero_takes_the_lowest_of_the_likeliest_ids():
    assert draw(1, torch.tensor([0.0, 2.0, 1.0, 2.0])) == [1]
    assert draw(1, torch.zeros(100_000, dtype=torch.bfloat16)) == [0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("params", "weights"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 2.0}, PROBABILITIES.sqrt()),
        ({"top_k": 3}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 1])),
        ({"top_p": 0.8}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 1])),
        ({"top_p": 0.6}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 0])),
        ({"top_k": 2, "top_p": 0.7}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 0])),  # 0.4 of the 0.65 that are left
        ({"top_k": 2, "top_p": 0.6}, PROBABILITIES * torch.tensor([0, 1, 0, 0, 0])),
        ({"top_k": 99, "top_p": 0.01}, PROBABILITIES * torch.tensor([0, 1, 0, 0, 0])),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(params, weights):
    num_tokens = 4000
    expected = num_tokens * weights / weights.sum()

    tokens = draw(num_tokens, **{"temperature": 1.0, "seed": 7, **params})
    counts = torch.bincount(torch.tensor(tokens), minlength=5)

    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: one seed in a thousand is beyond


def test_top_p_of_a_flat_distribution_keeps_thousands_of_tokens():
    logits = torch.linspace(0.001, 0, 5000)

    tokens = draw(1000, logits, temperature=1.0, seed=1, top_p=0.5)

    assert 2400 < max(tokens) < 2500  # the likeliest half


@pytest.mark.parametrize("seed", range(20))
def test_no_token_comes_from_outside_top_k_and_top_p(seed):
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1000, generator=random)
    ranked = logits.argsort(descending=True).tolist()
    cumulated = logits.softmax(-1).sort(descending=True).values.cumsum(-1)
    num_in_half = int((cumulated < 0.5).sum()) + 1

    assert set(draw(100, logits, temperature=1.0, seed=seed, top_k=5)) <= set(ranked[:5])
    assert set(draw(100, logits, temperature=1.0, seed=seed, top_p=0.5)) <= set(ranked[:num_in_half])
    assert set(draw(100, logits, temperature=1.0, seed=seed, top_k=1)) == {ranked[0]}


def test_an_impossible_token_is_never_drawn():
    logits = torch.full((1000,), -torch.inf)
    logits[500] = 0.0

    assert set(draw(200, logits, temperature=5.0, seed=1)) == {500}
    assert set(draw(200, logits, temperature=5.0, seed=1, top_k=10, top_p=0.999)) == {500}


def test_a_tiny_temperature_is_greedy():
    assert set(draw(50, temperature=1e-300, seed=1)) == {1}


def test_one_seed_draws_the_same_tokens_whatever_else_runs():
    alone = draw(50, temperature=1.0, seed=3)

    ours, other = (Sampler(SamplingParams(temperature=1.0, seed=seed)) for seed in (3, 4))
    together = []
    for _ in range(50):
        torch.rand(5)
        other.sample(LOGITS)
        together.append(ours.sample(LOGITS))

    assert together == alone
    assert draw(50, temperature=1.0, seed=4) != alone


def test_without_a_seed_every_request_draws_others():
    assert draw(50, temperature=1.0) != draw(50, temperature=1.0)


@pytest.mark.gpu
def test_a_seed_draws_the_same_tokens_on_gpu_and_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0))

    for params in ({}, {"top_k": 50}, {"top_p": 0.9}):
        on_cpu = draw(50, logits, temperature=1.0, seed=3, **params)
        assert draw(50, logits.cuda(), temperature=1.0, seed=3, **params) == on_cpu
