"""The draws of a step are those that each request would make alone, from the distribution that its parameters say."""

import random
from collections.abc import Sequence

import pytest
import torch
from one_row_sampler import OneRowSampler, plainly_cut

from kvtier.engine.model.drawing.draws import sample_tokens
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.sampling import SamplingParams

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBABILITIES.log()


def draw(num_tokens: int, logits: torch.Tensor = LOGITS, **params: object) -> list[int]:
    """Tokens that one request draws alone."""
    sampler = Sampler(SamplingParams(**params))
    return [sample_tokens(logits[None], [sampler])[0] for _ in range(num_tokens)]


def mixed_params(rng: random.Random) -> SamplingParams:
    """Parameters of a request such as people send; three in twelve are greedy."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.8]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        top_k=rng.choice([0, 0, 1, 5, 50, 300, 3000, 10**6]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.05, 1e-4, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
        logit_bias=rng.choice([{}, {}, {3: 6.0, 70: -100.0}]),
        seed=rng.randrange(1 << 40),
    )


def logits_of(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Logits flat and peaked, some of them in steps, as of a model in bfloat16."""
    source = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = torch.randn(num_rows, vocab_size, generator=source)
    logits *= torch.tensor([rng.choice([0.2, 1.0, 3.0, 8.0]) for _ in range(num_rows)])[:, None]
    in_steps = [rng.random() < 0.3 for _ in range(num_rows)]
    logits[in_steps] = logits[in_steps].bfloat16().float()
    return logits


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocab_size", [7, 200, 5000])
def test_a_step_of_mixed_requests_draws_what_each_would_draw_alone(seed: int, vocab_size: int) -> None:
    rng = random.Random(f"{seed} {vocab_size}")
    params = [mixed_params(rng) for _ in range(12)]
    params = [p if vocab_size > 70 else SamplingParams(temperature=p.temperature, seed=p.seed) for p in params]
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randrange(40))] for _ in params]
    samplers = [Sampler(p, prompt) for p, prompt in zip(params, prompts, strict=True)]
    alone = [OneRowSampler(p, prompt) for p, prompt in zip(params, prompts, strict=True)]

    for _ in range(12):
        logits = logits_of(rng, len(params), vocab_size)
        order = rng.sample(range(len(params)), rng.randrange(1, len(params) + 1))  # who is in the step changes
        drawn = sample_tokens(logits[order], [samplers[i] for i in order])

        assert drawn == [alone[i].sample(logits[i]) for i in order], f"{seed=}"


def test_the_logits_of_a_step_stay_as_they_are() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    params = SamplingParams(temperature=1.0, logit_bias={5: 3.0}, repetition_penalty=2.0, top_p=0.9)

    sample_tokens(logits, [Sampler(params, [1, 2, 3]) for _ in range(3)])

    assert torch.equal(logits, before)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01}])
def test_a_seeded_request_draws_the_same_whoever_else_is_in_the_step(cut: dict[str, float]) -> None:
    rng = random.Random(5)
    params = SamplingParams(temperature=1.0, seed=9, **cut)
    alone, among = Sampler(params), Sampler(params)

    for _ in range(30):
        logits = logits_of(rng, 6, 3000)
        others = [Sampler(mixed_params(rng)) for _ in range(5)]

        assert sample_tokens(logits[:1], [alone])[0] == sample_tokens(logits, [among, *others])[0]


def test_temperature_zero_takes_the_lowest_of_the_likeliest_ids() -> None:
    assert draw(1, torch.tensor([0.0, 2.0, 1.0, 2.0])) == [1]
    assert draw(1, torch.zeros(100_000)) == [0]


def test_of_equally_likely_tokens_the_cuts_keep_the_lowest_ids() -> None:
    logits = torch.zeros(5000)

    for cut in ({"top_k": 40}, {"top_k": 3000, "top_p": 40 / 3000 - 1e-9}, {"top_p": 40 / 5000 - 1e-9}):
        assert set(draw(60, logits, temperature=1.0, seed=1, **cut)) <= set(range(40))


@pytest.mark.long
@pytest.mark.parametrize(
    ("params", "weights"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 2.0}, PROBABILITIES.sqrt()),
        ({"top_k": 3}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 1])),
        ({"top_p": 0.8}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 1])),
        ({"top_p": 0.6}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 0])),
        ({"min_p": 0.3}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 1])),
        ({"min_p": 0.3, "top_p": 0.7}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 0])),  # 0.65 of the 0.85 that are left
        ({"min_p": 1.0}, PROBABILITIES * torch.tensor([0, 1, 0, 0, 0])),
        ({"top_k": 2, "top_p": 0.7}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 0])),  # 0.4 of the 0.65 that are left
        ({"top_k": 2, "top_p": 0.6}, PROBABILITIES * torch.tensor([0, 1, 0, 0, 0])),
        ({"top_k": 99, "top_p": 0.01}, PROBABILITIES * torch.tensor([0, 1, 0, 0, 0])),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(params: dict[str, float], weights: torch.Tensor) -> None:
    num_tokens = 4000
    expected = num_tokens * weights / weights.sum()

    tokens = draw(num_tokens, **{"temperature": 1.0, "seed": 7, **params})
    counts = torch.bincount(torch.tensor(tokens), minlength=5)

    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: one seed in a thousand is beyond


@pytest.mark.long
@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_p": 0.8, "min_p": 0.001}, {"top_k": 2500}])
def test_tokens_of_a_flat_distribution_come_as_often_as_their_probability_says(params: dict[str, float]) -> None:
    logits = torch.randn(4000, generator=torch.Generator().manual_seed(2))
    token_ids, probabilities = plainly_cut(logits, SamplingParams(temperature=1.0, **params))
    num_bands, num_tokens = 20, 4000
    band_of = {token_id: place * num_bands // len(token_ids) for place, token_id in enumerate(token_ids.tolist())}
    shares = torch.zeros(num_bands, dtype=torch.float64)
    for token_id, probability in zip(token_ids.tolist(), probabilities.tolist(), strict=True):
        shares[band_of[token_id]] += probability
    expected = num_tokens * shares / shares.sum()

    tokens = draw(num_tokens, logits, temperature=1.0, seed=11, **params)
    counts = torch.bincount(torch.tensor([band_of[token_id] for token_id in tokens]), minlength=num_bands)

    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # 19 degrees of freedom: one seed in a thousand is beyond


def test_top_p_of_a_flat_distribution_keeps_thousands_of_tokens() -> None:
    logits = torch.linspace(0.001, 0, 5000)

    tokens = draw(1000, logits, temperature=1.0, seed=1, top_p=0.5)

    assert 2400 < max(tokens) < 2500  # the likeliest half


@pytest.mark.parametrize("seed", range(20))
def test_no_token_comes_from_outside_the_cuts(seed: int) -> None:
    logits = 3 * torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    ranked = logits.argsort(descending=True).tolist()
    weights = (logits - logits.max()).exp()
    cumulated = logits.softmax(-1).sort(descending=True).values.cumsum(-1)
    num_in_half = int((cumulated < 0.5).sum()) + 1

    assert set(draw(100, logits, temperature=1.0, seed=seed, top_k=5)) <= set(ranked[:5])
    assert set(draw(100, logits, temperature=1.0, seed=seed, top_p=0.5)) <= set(ranked[:num_in_half])
    assert set(draw(100, logits, temperature=1.0, seed=seed, top_k=1)) == {ranked[0]}
    assert all(weights[token_id] >= 0.2 for token_id in draw(100, logits, temperature=1.0, seed=seed, min_p=0.2))


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[500] = 0.0

    for cut in ({}, {"top_k": 10, "top_p": 0.999}, {"top_p": 0.999}, {"top_k": 900}, {"min_p": 1e-9}):
        assert set(draw(200, logits, temperature=5.0, seed=1, **cut)) == {500}


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_tiny_temperature_is_greedy(cut: dict[str, float]) -> None:
    assert set(draw(50, temperature=1e-300, seed=1, **cut)) == {1}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cut", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_logits_that_are_no_numbers_give_some_token_and_change_no_other_row(
    value: float, cut: dict[str, float]
) -> None:
    good = torch.randn(3000, generator=torch.Generator().manual_seed(4))
    bad = torch.full((3000,), value)
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, **cut})

    drawn = sample_tokens(torch.stack([bad, good, bad]), [Sampler(params) for _ in range(3)])

    assert all(0 <= token_id < 3000 for token_id in drawn)
    assert drawn[1] == sample_tokens(good[None], [Sampler(params)])[0]


def test_without_a_seed_every_request_draws_others() -> None:
    assert draw(50, temperature=1.0) != draw(50, temperature=1.0)


def test_another_seed_draws_others() -> None:
    assert draw(50, temperature=1.0, seed=3) != draw(50, temperature=1.0, seed=4)


@pytest.mark.gpu
def test_a_seed_draws_the_same_tokens_on_gpu_and_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    cuts: Sequence[dict[str, float]] = ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}, {"repetition_penalty": 1.3})

    for cut in cuts:
        on_cpu = draw(50, logits, temperature=1.0, seed=3, **cut)
        assert draw(50, logits.cuda(), temperature=1.0, seed=3, **cut) == on_cpu
