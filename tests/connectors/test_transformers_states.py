"""KVTierCache and models with recurrent or convolution states: a prompt resumes only where its own state was stored."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from damaged_files import damage
from generated_prompts import NUM_TOKENS, opened, prompt_of
from small_models import COMMON
from state_models import FAMILIES, build_states
from transformers import DynamicCache, JambaConfig, JambaForCausalLM, PreTrainedModel

from kvtier import KVTierCache, UnsupportedModel
from kvtier.connectors.transformers_cache.kept_states import chunk_ends, places_to_keep

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]

BLOCK_SIZE = 16
NUM_NEW = 24
TOLERANCE = 1e-4  # of the largest logit, between results of the same passes
GREEDY = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
GREEDY |= {"return_dict_in_generate": True, "output_logits": True}
ONLY_STATES = {"Mamba2"}
END = 288  # the end of the last full block of a prompt of 300 tokens
BEFORE_QUESTION = 160  # the end of the last full block before the last 128 tokens
ANSWER_END = 320  # the end of the last full block of such a prompt with its answer


@pytest.fixture
def model() -> PreTrainedModel:
    return build_states("Qwen3Next")


@dataclass
class Answer:
    token_ids: torch.Tensor  # [1, prompt and answer]
    logits: torch.Tensor  # [NUM_NEW, vocab]
    num_loaded: int = 0


def plain(model: PreTrainedModel, prompt: torch.Tensor, past: DynamicCache | None = None) -> Answer:
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=past, **GREEDY)
    return Answer(output.sequences, torch.cat(output.logits))


@torch.no_grad()
def in_passes(model: PreTrainedModel, prompt: torch.Tensor, ends: list[int]) -> DynamicCache:
    """transformers' own cache after passes that end there."""
    past = DynamicCache(config=model.config)
    for start, end in zip([0, *ends], ends, strict=False):
        model(prompt[:, start:end], cache=past, position_ids=torch.arange(start, end)[None])
    return past


def continued(model: PreTrainedModel, prompt: torch.Tensor, ends: list[int]) -> Answer:
    """Return the answer of `generate` after passes that end at *ends*, with the whole prompt before its new tokens."""
    past, is_cut = in_passes(model, prompt, ends), type(model).__name__.removesuffix("ForCausalLM") in ONLY_STATES
    answer = plain(model, prompt[:, ends[-1] :] if is_cut else prompt, past)
    return Answer(torch.cat([prompt[:, : ends[-1]], answer.token_ids], dim=1), answer.logits) if is_cut else answer


def ask(cache: KVTierCache, model: PreTrainedModel, prompt: torch.Tensor) -> Answer:
    with cache.prompt(prompt) as past:
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=past, **GREEDY)
    return Answer(output.sequences, torch.cat(output.logits), past.num_loaded_tokens)


def assert_equal(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids.tolist() == expected.token_ids.tolist()
    assert (answer.logits - expected.logits).abs().max() <= TOLERANCE * expected.logits.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_generate_cold_cached_after_a_restart_and_for_the_next_turn(
    tmp_path: Path, family: str
) -> None:
    """Bit for bit those of the first time, and to rounding those that transformers computes in the same passes."""
    model = build_states(family)
    prompt = prompt_of(1)
    expected = plain(model, prompt)
    next_turn = torch.cat([expected.token_ids, prompt_of(2, 20)], dim=1)
    one_by_one = [BEFORE_QUESTION, END, NUM_TOKENS, *range(NUM_TOKENS + 1, ANSWER_END + 1)]
    expected_next = continued(model, next_turn, one_by_one)

    with opened(tmp_path, model) as cache:
        cold, cached = ask(cache, model, prompt), ask(cache, model, prompt)
        stored = cache.statistics().stored_states
    with opened(tmp_path, model) as cache:
        restarted, following = ask(cache, model, prompt), ask(cache, model, next_turn)

    assert_equal(cold, expected)
    for answer in (cached, restarted):
        assert answer.token_ids.tolist() == cold.token_ids.tolist()
        assert torch.equal(answer.logits, cold.logits)
    assert_equal(following, expected_next)
    assert following.token_ids.tolist() == plain(model, next_turn).token_ids.tolist()
    assert [answer.num_loaded for answer in (cold, cached, restarted, following)] == [0, END, END, ANSWER_END]
    assert stored == len({BEFORE_QUESTION, END, ANSWER_END})


def test_another_question_about_a_text_resumes_before_the_question(tmp_path: Path, model: PreTrainedModel) -> None:
    text = prompt_of(1, 180)
    questions = [torch.cat([text, prompt_of(seed, 120)], dim=1) for seed in (2, 3)]

    with opened(tmp_path, model) as cache:
        answers = [ask(cache, model, question) for question in questions]

    assert [answer.num_loaded for answer in answers] == [0, BEFORE_QUESTION]
    for answer, question in zip(answers, questions, strict=True):
        assert_equal(answer, plain(model, question))


@pytest.mark.parametrize("family", ["Qwen3Next", "Mamba2"])
def test_where_two_prompts_part_a_state_is_kept_for_the_third(tmp_path: Path, family: str) -> None:
    """Their keys and values, if there are any, are on disk there, but the first prompt had no pass that ended there."""
    model = build_states(family)
    prompts = [torch.cat([prompt_of(1, 100), prompt_of(seed, 200)], dim=1) for seed in (2, 3, 4)]

    with opened(tmp_path, model) as cache:
        answers = [ask(cache, model, prompt) for prompt in prompts]

    assert [answer.num_loaded for answer in answers] == [0, 0, 96]
    for answer, prompt in zip(answers, prompts, strict=True):
        assert_equal(answer, plain(model, prompt))


def test_a_prompt_resumes_from_its_own_state_and_not_from_that_of_another_one_of_equal_length(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    prompts = [prompt_of(seed) for seed in (1, 2)]

    with opened(tmp_path, model) as cache:
        first = [ask(cache, model, prompt) for prompt in prompts]
        again = [ask(cache, model, prompt) for prompt in prompts]

    assert [answer.num_loaded for answer in (*first, *again)] == [0, 0, END, END]
    for answer, prompt in zip((*first, *again), prompts * 2, strict=True):
        assert_equal(answer, plain(model, prompt))


@torch.no_grad()
def test_the_state_after_guessed_tokens_that_were_taken_back_is_not_stored(tmp_path: Path) -> None:
    """Other tokens follow in their place, and a block has the name of these."""
    model = build_states("Lfm2")
    prompt, guessed = prompt_of(1, 20), prompt_of(2, 12)
    answer = torch.cat([prompt, guessed[:, :4], prompt_of(3, 13)], dim=1)
    follow_up = torch.cat([answer, prompt_of(4, 20)], dim=1)

    with opened(tmp_path, model) as cache:
        with cache.prompt(prompt) as past:
            past.activate_past_recording()
            for token_ids, start in ((prompt[:, 16:], 16), (guessed, 20)):
                positions = torch.arange(start, start + token_ids.shape[1])[None]
                model(token_ids, past_key_values=past, position_ids=positions)
            past.crop(-8)
            model(answer[:, 24:], past_key_values=past, position_ids=torch.arange(24, 37)[None])
        resumed = ask(cache, model, follow_up)

    assert resumed.num_loaded == 16
    assert_equal(resumed, plain(model, follow_up))


@torch.no_grad()
@pytest.mark.parametrize("family", ["Qwen3Next", "Mamba2"])
def test_tokens_cannot_be_taken_back_from_recurrent_states(tmp_path: Path, family: str) -> None:
    """transformers would take them back from keys, values and convolutions only, and the next state be wrong."""
    model, prompt = build_states(family), prompt_of(1, 33)
    with opened(tmp_path, model) as cache, cache.prompt(prompt) as past:
        past.activate_past_recording()
        model(prompt[:, 32:], cache=past, position_ids=torch.tensor([[32]]))
        past.crop(0)
        with pytest.raises(ValueError, match="cannot be taken back from recurrent states"):
            past.crop(-1)


@torch.no_grad()
def test_a_pass_that_is_not_seen_and_adds_nothing_but_states_ends_what_is_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = build_states("Mamba2"), prompt_of(1, 33)
    with opened(tmp_path, model) as cache:
        with cache.prompt(prompt) as past:
            model.backbone(prompt_of(2, 16), cache=past)
            model(prompt[:, 32:], cache=past)
            model(prompt_of(3, 31), cache=past)
        seen = cache.statistics()

    assert "a pass that KVTierCache did not see" in caplog.text
    assert (seen.stored_blocks, seen.stored_states) == (2, 1)  # of the prompt


def test_a_damaged_state_is_found_and_the_prompt_resumes_from_an_earlier_one(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    with opened(tmp_path, model) as cache:
        ask(cache, model, prompt_of(1))
    state = in_passes(model, prompt_of(1), [BEFORE_QUESTION, END]).layers[0].recurrent_states[0]
    damage(tmp_path / "store", state.numpy().tobytes()[:256])

    with opened(tmp_path, model) as cache:
        answer, again = ask(cache, model, prompt_of(1)), ask(cache, model, prompt_of(1))
        seen = cache.statistics()

    assert (answer.num_loaded, again.num_loaded) == (BEFORE_QUESTION, END)
    for found in (answer, again):
        assert_equal(found, plain(model, prompt_of(1)))
    assert (seen.corrupt_blocks, seen.stored_blocks, seen.stored_states) == (1, 0, 1)


@torch.no_grad()
def test_in_autocast_nothing_is_computed_ahead_and_nothing_is_stored(
    tmp_path: Path, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, model) as cache:
        with torch.autocast("cpu", torch.bfloat16), cache.prompt(prompt_of(1)) as past:
            assert past.get_seq_length() == 0
            model.generate(prompt_of(1), past_key_values=past, **GREEDY)
        seen = cache.statistics()

    assert "torch.autocast computes it in another dtype" in caplog.text
    assert (seen.stored_blocks, seen.stored_states) == (0, 0)


@torch.no_grad()
def test_a_pass_without_positions_is_refused_after_what_prompt_has_computed(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    """Some models would number its tokens from 0 on."""
    prompt = prompt_of(1)
    refused = pytest.raises(ValueError, match=r"has computed 288 more in this way, .* it has no position_ids")
    with opened(tmp_path, model) as cache, refused, cache.prompt(prompt) as past:
        model(prompt[:, END:], past_key_values=past)


@torch.no_grad()
def test_a_pass_with_a_mask_of_its_own_stores_no_state(
    tmp_path: Path, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(1, 17)
    mask = torch.ones(1, 1, 47, 64, dtype=torch.bool).tril(17)
    with opened(tmp_path, model) as cache:
        with cache.prompt(prompt) as past:
            model(prompt[:, 16:], past_key_values=past, position_ids=torch.tensor([[16]]))
            positions = torch.arange(17, 64)[None]
            model(prompt_of(2, 47), past_key_values=past, position_ids=positions, attention_mask=mask)
        seen = cache.statistics()

    assert "its attention_mask is not the causal one" in caplog.text
    assert (seen.stored_blocks, seen.stored_states) == (1, 1)  # of the prompt


@pytest.mark.parametrize(
    ("num_tokens", "num_held", "places"),
    [(300, 0, [160, 288]), (300, 100, [96, 160, 288]), (289, 0, [160, 288]), (288, 0, [144, 272]), (16, 16, [])],
)
def test_states_are_kept_before_a_question_at_the_end_and_where_keys_and_values_are_known(
    num_tokens: int, num_held: int, places: list[int]
) -> None:
    assert places_to_keep(num_tokens, num_held, BLOCK_SIZE) == places


def test_no_pass_has_more_than_2048_tokens_and_one_ends_at_each_place() -> None:
    assert chunk_ends(0, [160, 5000]) == [160, 2208, 4256, 5000]
    assert chunk_ends(160, [96, 160, 288]) == [288]
    assert chunk_ends(288, [160, 288]) == []


def test_a_model_that_ignores_its_states_is_refused(tmp_path: Path) -> None:
    sizes = {**COMMON, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}
    jamba = JambaForCausalLM(JambaConfig(**sizes, use_mamba_kernels=False)).eval()
    with pytest.raises(UnsupportedModel, match="when the prompt continues"):
        KVTierCache.open(tmp_path / "store", jamba)
