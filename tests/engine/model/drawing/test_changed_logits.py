"""Logits with bias, penalties and bans, for all rows at once: as vLLM defines them and transformers computes them."""

import random
from collections.abc import Sequence

import pytest
import torch
from one_row_sampler import plainly_changed
from transformers import MinLengthLogitsProcessor, NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from kvtier.engine.model.drawing.changed_logits import changed_logits
from kvtier.engine.model.drawing.ranking import Scratch
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.drawing.token_bans import TokenBans
from kvtier.engine.model.sampling import SamplingParams

VOCAB = 50


def drawn(sampler: Sampler, output: list[int]) -> Sampler:
    for token_id in output:
        sampler.on_drawn(token_id)
    return sampler


def changed_of(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    return changed_logits(logits, samplers, Scratch(logits.numel(), logits.device))


def logits_of(seed: int, num_rows: int = 1) -> torch.Tensor:
    return 4 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_a_step_that_asks_for_nothing_gets_its_own_logits_back() -> None:
    logits = logits_of(1, 3)

    assert changed_of(logits, [Sampler(SamplingParams(temperature=1.0)) for _ in range(3)]) is logits


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_different_penalties_and_biases_are_changed_each_as_alone(seed: int) -> None:
    rng = random.Random(seed)
    logits, samplers, expected = logits_of(seed, 6), [], []
    for row in logits:
        params = SamplingParams(
            repetition_penalty=rng.choice([1.0, 0.5, 1.7]),
            presence_penalty=rng.choice([0.0, 1.5, -2.0]),
            frequency_penalty=rng.choice([0.0, 0.7, -1.0]),
            logit_bias={rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(rng.randrange(4))},
        )
        prompt, output = ([rng.randrange(VOCAB) for _ in range(rng.randrange(60))] for _ in range(2))
        samplers.append(drawn(Sampler(params, prompt), output))
        expected.append(plainly_changed(row, params, prompt, output))

    assert torch.allclose(changed_of(logits, samplers), torch.stack(expected), atol=1e-5), f"{seed=}"


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    prompt, output, logits = [3, 9, 9, 40], [7, 3, 7], logits_of(2)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), logits.clone())

    ours = changed_of(logits, [drawn(Sampler(SamplingParams(repetition_penalty=1.3), prompt), output)])

    assert torch.equal(ours, theirs)


def test_presence_and_frequency_are_of_the_output_alone() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    sampler = drawn(Sampler(params, [1, 1, 2]), [2, 4, 4])

    changed = changed_of(torch.zeros(1, 6), [sampler])

    assert changed.tolist() == [[0.0, 0.0, -0.75, 0.0, -1.0, 0.0]]


def test_tokens_that_end_the_text_are_impossible_until_there_are_enough() -> None:
    logits, bans = logits_of(3), TokenBans(min_tokens=2, end_token_ids=(5, 8))
    theirs = MinLengthLogitsProcessor(2, [5, 8], device="cpu")(torch.tensor([[1]]), logits.clone())
    sampler = Sampler(SamplingParams(min_tokens=2), [], bans)

    for output in ([], [1]):
        assert torch.equal(changed_of(logits, [drawn(sampler, output)]), theirs)
    assert torch.equal(changed_of(logits, [drawn(sampler, [2])]), logits)


@pytest.mark.parametrize("output", [[], [7], [1, 2], [2, 1, 2], [1, 2, 3], [7, 1]])
def test_bad_words_are_never_completed(output: list[int]) -> None:
    words, logits = [[1, 2, 3], [7, 7], [30]], logits_of(4)
    before = torch.tensor([output or [49]])
    theirs = NoBadWordsLogitsProcessor(words)(before, logits.clone())
    sampler = Sampler(SamplingParams(), [1, 2], TokenBans(bad_words=tuple(map(tuple, words))))

    assert torch.equal(changed_of(logits, [drawn(sampler, output)]), theirs)


def test_a_token_that_a_bias_favours_stays_impossible_if_it_is_banned() -> None:
    sampler = Sampler(SamplingParams(logit_bias={2: 100.0}), [], TokenBans(bad_words=((2,),)))

    assert changed_of(torch.zeros(1, 4), [sampler]).tolist() == [[0.0, 0.0, -torch.inf, 0.0]]
