"""Models with recurrent states in the whole engine: the same tokens from every tier, and where states are kept."""

import random
from pathlib import Path
from typing import Any

import pytest
from engine_sidecar import started_sidecar
from equal_answers import BLOCK_SIZE, GREEDY, NUM_NEW, NUM_TOKENS, READ_TIMEOUT_S, chain_of, prompt_of, push_down
from small_models import byte_tokenizer, plain_greedy
from state_models import FAMILIES, build_states
from transformers import PreTrainedModel
from waiting import wait_for

from kvtier import LLM, SamplingParams
from kvtier.engine.model.paged_layout import layout_of
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Reason, Tier

# Linear attention, a state beside attention in each layer, and no attention.
QUICK = ["Qwen3_5Text", "FalconH1", "Mamba2"]
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in QUICK]
PROMPT_END = (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
CHUNK = 64


def configuration(
    model: PreTrainedModel, folder: Path, num_blocks: int = 40, num_states: int = 4, **device: Any
) -> dict[str, Any]:
    layout = layout_of(model, BLOCK_SIZE)
    return {
        "device": {"capacity": layout.capacity_for(num_blocks, num_states), "block_size": BLOCK_SIZE, **device},
        "host": {"capacity": layout.capacity_for(num_blocks + 20, num_states + 2)},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB", "read_timeout_s": READ_TIMEOUT_S},
        "scheduler": {"prefill_chunk": CHUNK, "token_budget": 2 * CHUNK, "load": "always"},
    }


def on_device(llm: LLM, prompt: list[int]) -> int:
    """Tokens that a request with this prompt finds on the device."""
    return llm.generate(prompt, SamplingParams(max_tokens=1))[0].tokens.device


@pytest.mark.parametrize("family", [*QUICK, *OTHERS])
def test_greedy_tokens_are_the_same_cold_and_from_every_tier(family: str, tmp_path: Path) -> None:
    model = build_states(family)
    prompt = prompt_of(1)
    expected = plain_greedy(model, prompt, NUM_NEW)
    config = configuration(model, tmp_path)

    with LLM(model, config, byte_tokenizer()) as llm:
        cold = llm.generate(prompt, GREEDY)[0]
        from_device = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.DEVICE)
        from_below = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.HOST)
        from_disk = llm.generate(prompt, GREEDY)[0]
        llm.check()
    with LLM(model, config, byte_tokenizer()) as llm:
        restarted = llm.generate(prompt, GREEDY)[0]

    answers = [cold, from_device, from_below, from_disk, restarted]
    assert [done.token_ids for done in answers] == [expected] * 5
    assert (cold.tokens.recomputed, from_device.tokens.device) == (NUM_TOKENS, PROMPT_END)
    assert from_below.tokens.host + from_below.tokens.disk > 0
    assert from_disk.tokens.disk > 0
    assert restarted.tokens.disk == PROMPT_END
    for done in answers[1:]:
        assert done.tokens.recomputed == NUM_TOKENS - PROMPT_END


@pytest.mark.long
@pytest.mark.parametrize("family", ["FalconH1", "Mamba2"])
def test_a_batch_in_a_tiny_pool_gives_the_tokens_of_single_requests(family: str, tmp_path: Path) -> None:
    """Three states fit: requests wait for each other, or are preempted and resume."""
    model = build_states(family)
    prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in enumerate((300, 211, 64, 299, 33, 160))]
    expected = [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]
    config = configuration(model, tmp_path, num_blocks=22, num_states=3, poison=True)
    layout = layout_of(model, BLOCK_SIZE)
    config["device"]["capacity"] = 22 * layout.token_block_bytes + 3 * layout.states.slot_bytes

    with LLM(model, config, byte_tokenizer()) as llm:
        for _ in range(2):
            done = llm.generate(prompts, GREEDY)
            assert [answer.token_ids for answer in done] == expected
        llm.check()


def test_a_request_holds_two_states_at_most(tmp_path: Path) -> None:
    model = build_states("Qwen3_5Text")
    prompt = prompt_of(1)
    layout = layout_of(model, BLOCK_SIZE)
    config = configuration(model, tmp_path, retention_tokens=0)
    del config["disk"]
    config["host"]["capacity"] = 0  # so that no copy holds a lease after the answer
    config["device"]["capacity"] = 22 * layout.token_block_bytes + 2 * layout.states.slot_bytes

    with LLM(model, config, byte_tokenizer()) as llm:
        assert llm.core.cache.free_slots()[-1] == 2
        answer = llm.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))[0]
        assert llm.core.cache.free_slots()[-1] == 2

    assert answer.token_ids == plain_greedy(model, prompt, 40)


def test_states_are_kept_at_the_interval_and_at_the_end_of_a_prompt_and_128_tokens_before(tmp_path: Path) -> None:
    """By default the interval of this model is 512; a state is kept nowhere else, so there is nothing to resume at."""
    model = build_states("Qwen3_5Text")
    prompt = prompt_of(1, 1100)
    other = random.Random(9).randrange(256)

    with LLM(model, configuration(model, tmp_path, 200, 12), byte_tokenizer()) as llm:
        llm.generate(prompt, SamplingParams(max_tokens=1))
        found = {num: on_device(llm, [*prompt[:num], other]) for num in (500, 520, 950, 970, 1030, 1099)}
        again = on_device(llm, prompt)

    assert found == {500: 0, 520: 512, 950: 512, 970: 960, 1030: 1024, 1099: 1088}
    assert again == 1088


@pytest.mark.parametrize("family", ["FalconH1", "Mamba2"])
def test_where_two_prompts_part_a_state_is_kept_for_the_third(family: str, tmp_path: Path) -> None:
    """The second prompt resumes 128 tokens before the end of the first."""
    model = build_states(family)
    document = prompt_of(1, 200)
    questions = [prompt_of(seed, 30) for seed in (2, 3, 4)]
    expected = [plain_greedy(model, document + question, NUM_NEW) for question in questions]

    with LLM(model, configuration(model, tmp_path), byte_tokenizer()) as llm:
        done = [llm.generate(document + question, GREEDY)[0] for question in questions]

    assert [answer.token_ids for answer in done] == expected
    assert [answer.tokens.device for answer in done] == [0, 96, 192]


@pytest.mark.parametrize("family", ["FalconH1", "Mamba2"])
def test_tokens_whose_state_is_missing_are_recomputed_for_that_reason(family: str, tmp_path: Path) -> None:
    """Between the state and the place where the prompts part, the tokens were computed before. The rest is new."""
    model = build_states(family)
    document = prompt_of(1, 200)

    with LLM(model, configuration(model, tmp_path), byte_tokenizer()) as llm:
        llm.generate(document + prompt_of(2, 30), GREEDY)
        second = llm.generate(document + prompt_of(3, 30), GREEDY)[0].tokens

    assert (second.device, second.recomputed) == (96, 134)
    assert second.reasons == {Reason.NOT_KEPT: 96, Reason.NEVER_SEEN: 32, Reason.LAST_BLOCK: 6}


@pytest.mark.parametrize(  # shorter and longer than the interval
    ("family", "num_tokens"), [("Qwen3_5Text", 306), ("Qwen3_5Text", 530), ("Mamba2", 306)]
)
def test_an_evicted_state_is_the_reason_although_its_keys_and_values_are_still_cached(
    family: str, num_tokens: int, tmp_path: Path
) -> None:
    model = build_states(family)
    prompt = prompt_of(1, num_tokens)
    config = configuration(model, tmp_path, 300, 3)
    del config["disk"]
    config["host"]["capacity"] = 0

    with LLM(model, config, byte_tokenizer()) as llm:
        num_states = llm.core.cache.free_slots()[-1]
        llm.generate(prompt, SamplingParams(max_tokens=1))
        for seed in range(2, 2 + num_states):  # each takes three blocks, and a state
            llm.generate(prompt_of(seed, 33), SamplingParams(max_tokens=1))
        rows = llm.core.explain_prompt(chain_of(llm, prompt)).explanation().rows
        again = llm.generate(prompt, SamplingParams(max_tokens=1))[0].tokens

    assert again.recomputed == num_tokens
    assert again.reasons[Reason.EVICTED_FROM_DEVICE] == num_tokens - 2
    assert [row.why for row in rows] == [Reason.EVICTED_FROM_DEVICE, Reason.LAST_BLOCK]


def test_states_are_counted_in_each_tier_and_a_pin_keeps_one(tmp_path: Path) -> None:
    """A prompt of 300 tokens has 18 full blocks. Two states of it are kept, one of them 128 tokens before its end."""
    model = build_states("FalconH1")
    prompt = prompt_of(1)

    with LLM(model, configuration(model, tmp_path), byte_tokenizer()) as llm:
        llm.generate(prompt, SamplingParams(max_tokens=1))
        push_down(llm, prompt, Tier.HOST)
        tiers = llm.statistics().cache.tiers
        chain = chain_of(llm, prompt)
        pinned, num_bytes = llm.core.pinned_bytes(NUM_TOKENS), llm.core.cache.lookups.bytes_in(chain)

    block, state = layout_of(model, BLOCK_SIZE).block_bytes
    assert tiers[Tier.DISK].num_states >= 2
    assert num_bytes == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.DISK: 18 * block + 2 * state, Tier.REMOTE: 0}
    assert pinned == 18 * block + state


def test_the_next_turn_of_a_chat_resumes_at_the_end_of_the_answer(tmp_path: Path) -> None:
    model = build_states("Qwen3_5Text")
    prompt = prompt_of(1, 100)

    with LLM(model, configuration(model, tmp_path), byte_tokenizer()) as llm:
        answer = llm.generate(prompt, SamplingParams(max_tokens=50, ignore_eos=True))[0]
        turn = [*prompt, *answer.token_ids, *prompt_of(2, 20)]
        next_answer = llm.generate(turn, GREEDY)[0]

    # 149 tokens were computed, because the last one is only sampled.
    assert next_answer.tokens.device == 144
    assert next_answer.token_ids == plain_greedy(model, turn, NUM_NEW)


def test_a_lossy_codec_is_refused_because_states_have_several_dtypes(tmp_path: Path) -> None:
    model = build_states("Qwen3_5Text")
    config = configuration(model, tmp_path)
    config["disk"]["codec"] = "fp8"

    with pytest.raises(ValueError, match=r'disk\.codec "fp8" cannot round recurrent states'):
        LLM(model, config, byte_tokenizer())


@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3_5Text", "Mamba2"])
def test_a_second_engine_finds_the_states_in_a_sidecar(family: str, tmp_path: Path) -> None:
    model = build_states(family)
    prompt = prompt_of(1)
    socket = str(tmp_path / "own.sock")
    config = {**configuration(model, tmp_path), "sidecar": f"unix://{socket}"}
    del config["host"], config["disk"]

    with (
        started_sidecar(tmp_path, socket),
        LLM(model, config, byte_tokenizer()) as first,
        LLM(model, config, byte_tokenizer()) as second,
    ):
        expected = first.generate(prompt, GREEDY)[0]

        def is_found() -> bool:
            for llm in (first, second):
                llm.statistics()
            return second.core.cache.lookup(chain, NUM_TOKENS).num_tokens == PROMPT_END

        chain = chain_of(second, prompt)
        first.core.share()
        wait_for(is_found)
        done = second.generate(prompt, GREEDY)[0]
        second.check()

    assert done.token_ids == expected.token_ids == plain_greedy(model, prompt, NUM_NEW)
    assert done.tokens.host == PROMPT_END


def test_a_prompt_that_waits_for_a_shared_document_resumes_where_the_document_ends(tmp_path: Path) -> None:
    model = build_states("Qwen3_5Text")
    document = prompt_of(1, 200)
    prompts = [document + prompt_of(seed, 30) for seed in (2, 3, 4)]

    with LLM(model, configuration(model, tmp_path), byte_tokenizer()) as llm:
        done = llm.generate(prompts, GREEDY)

    assert [answer.token_ids for answer in done] == [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]
    assert [answer.tokens.device for answer in done] == [0, 192, 192]


def test_each_waiting_prompt_resumes_where_its_own_part_of_the_document_ends(tmp_path: Path) -> None:
    """The first prompt shares 400 tokens with the second and 208 with the third, which wait for it."""
    model = build_states("Qwen3_5Text")
    document = prompt_of(1, 400)
    prompts = [document + prompt_of(2, 160), document + prompt_of(3, 30), document[:208] + prompt_of(4, 30)]
    config = configuration(model, tmp_path, 200, 12)

    with LLM(model, config, byte_tokenizer()) as llm:
        done = llm.generate(prompts, GREEDY)

    assert [answer.token_ids for answer in done] == [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]
    assert [answer.tokens.device for answer in done] == [0, 400, 208]


def test_a_request_that_ends_in_its_prefill_leaves_a_state_at_the_end_of_its_last_chunk(tmp_path: Path) -> None:
    """Chunks of 50 tokens would end inside blocks of 16, where no state has a name."""
    model = build_states("Qwen3_5Text")
    prompt = prompt_of(1)
    config = configuration(model, tmp_path)
    config["scheduler"] |= {"prefill_chunk": 50, "token_budget": 50}

    with LLM(model, config, byte_tokenizer()) as llm:
        request = llm.core.add(prompt, GREEDY, NO_EXTRA_KEYS, arrived_at=0.0)
        for _ in range(2):
            llm.core.step()
        llm.core.abort(request)
        done = llm.generate(prompt, GREEDY)[0]

    assert done.tokens.device == 96
    assert done.token_ids == plain_greedy(model, prompt, NUM_NEW)
