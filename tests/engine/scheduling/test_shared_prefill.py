"""Prompts that begin alike and come together: the beginning is computed once."""

import random

import pytest
from small_models import byte_tokenizer, plain_greedy
from stepped_core import (
    BLOCK_SIZE,
    _disk_with_a_gate,  # noqa: F401
    add,
    assert_nothing_leased,
    engine,
    finish,
    prompt_of,
    step,
    step_until,
)
from transformers import PreTrainedModel
from urgent_requests import add_with

from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import Request, RequestOptions
from kvtier.engine.scheduling.scheduler import num_common_tokens
from kvtier.engine.text.detokenizer import Detokenizer
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain, ExtraKeys

DOCUMENT = prompt_of(99, 25 * BLOCK_SIZE)
CHUNK = 64  # of the scheduler in these tests


def question(number: int) -> list[int]:
    return DOCUMENT + prompt_of(number, 20)


def recomputed(*requests: Request) -> int:
    return sum(request.tokens.recomputed for request in requests if request.tokens is not None)


def test_questions_about_a_new_document_that_come_together_compute_it_once(model: PreTrainedModel) -> None:
    with engine(model) as core:
        asked = [add(core, question(number)) for number in range(6)]
        finish(core)
        assert_nothing_leased(core)

    assert [request.generated for request in asked] == [plain_greedy(model, question(n), 8) for n in range(6)]
    # Each later request computes its question, and the rest of the document, less than a chunk, when its turn came.
    assert recomputed(*asked) <= len(DOCUMENT) + 6 * 20 + 5 * CHUNK
    assert recomputed(asked[0]) == len(question(0))


def test_a_request_that_begins_otherwise_does_not_wait_with_them(model: PreTrainedModel) -> None:
    with engine(model, token_budget=256) as core:
        first, second = (add(core, question(number)) for number in range(2))
        other = add(core, prompt_of(5, 30))

        shares = step(core)
        finish(core)

    assert [share.request for share in shares] == [first, other]
    assert second.tokens is not None
    assert second.tokens.recomputed < 20 + CHUNK


def test_the_requests_that_wait_go_on_if_the_first_is_ended(model: PreTrainedModel) -> None:
    with engine(model) as core:
        first, second = (add(core, question(number)) for number in range(2))
        for _ in range(2):
            step(core)
        assert second in core.scheduler.waiting

        core.abort(first)
        finish(core)
        assert_nothing_leased(core)

    assert second.generated == plain_greedy(model, question(1), 8)
    assert second.tokens is not None
    assert second.tokens.device == 2 * CHUNK


@pytest.mark.parametrize(
    "options",
    [
        (RequestOptions(priority=5), RequestOptions()),
        (RequestOptions(), RequestOptions(reads_cache=False)),
        (RequestOptions(max_load_tokens=0), RequestOptions()),
    ],
    ids=["for the less urgent", "if it wants no hit", "for one that takes no hits"],
)
def test_no_request_waits(model: PreTrainedModel, options: tuple[RequestOptions, RequestOptions]) -> None:
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    with engine(model, token_budget=256) as core:
        for number, its in enumerate(options):
            core.add(question(number), greedy, NO_EXTRA_KEYS, 0.0, its)
            shares = step(core)

        assert len(shares) == 2
        finish(core)


def test_for_less_than_a_chunk_no_request_waits(model: PreTrainedModel) -> None:
    with engine(model, token_budget=256) as core:
        for number in range(2):
            add(core, DOCUMENT[: CHUNK - 1] + prompt_of(number, 200))

        assert len(step(core)) == 2
        finish(core)


def test_tenants_do_not_wait_for_each_other(model: PreTrainedModel) -> None:
    with engine(model, token_budget=256) as core:
        for salt in ("ann", "eve"):
            core.add(question(0), SamplingParams(max_tokens=8, ignore_eos=True), ExtraKeys(cache_salt=salt), 0.0)

        assert len(step(core)) == 2
        finish(core)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_random_questions_in_a_small_pool_get_the_tokens_of_being_alone(model: PreTrainedModel, seed: int) -> None:
    rng = random.Random(seed)
    documents = [prompt_of(number, rng.randrange(5, 15) * BLOCK_SIZE) for number in range(3)]
    asked, ended = [], []
    with engine(model, num_slots=40, num_host_slots=60) as core:
        for number in range(20):
            prompt = rng.choice(documents) + prompt_of(number, rng.randrange(1, 40))
            asked.append(add_with(core, prompt, rng.randrange(2), max_tokens=rng.randrange(1, 20)))
            if rng.random() < 0.2:
                ended.append(rng.choice(asked))
                core.abort(ended[-1])
            for _ in range(rng.randrange(4)):
                step(core)
                core.check()
        step_until(core, lambda: not core.has_work)
        assert_nothing_leased(core)

    for request in asked:
        if request not in ended:
            expected = plain_greedy(model, list(request.prompt_token_ids), request.sampling.max_tokens)
            assert request.generated == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_common_beginning_is_found(seed: int) -> None:
    rng = random.Random(seed)
    one = prompt_of(seed, rng.randrange(1, 200))
    num_equal = rng.randrange(len(one) + 1)
    other = one[:num_equal] + prompt_of(seed + 1000, rng.randrange(1, 200))

    requests = []
    for prompt in (one, other):
        chain = BlockChain(BLOCK_SIZE)
        chain.extend(prompt)
        requests.append(Request(prompt, SamplingParams(), chain, Detokenizer(byte_tokenizer(), [])))

    equal = [a == b for a, b in zip(one, other, strict=False)]
    expected = equal.index(False) if False in equal else len(equal)
    assert num_common_tokens(*requests) == expected // BLOCK_SIZE * BLOCK_SIZE
    assert num_common_tokens(*reversed(requests)) == expected // BLOCK_SIZE * BLOCK_SIZE
