"""transformers' `generate` with KVTierCache: what it answers without, and only what is new is computed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_files import damage
from generated_prompts import NUM_TOKENS, opened, prompt_of
from small_models import COMMON, MODELS, MORE_MODELS, build
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from kvtier import KVTierCache
from kvtier.connectors.transformers_cache import cache as cache_module
from kvtier.connectors.transformers_cache.prompt_cache import PromptCache
from kvtier.connectors.transformers_cache.row_layout import RowLayout

pytestmark = pytest.mark.long

BLOCK_SIZE = 16
NUM_NEW = 24
WHOLE = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
TOLERANCE = 1e-4  # of the largest logit: what is computed in other pieces is rounded otherwise
GREEDY = {"max_new_tokens": NUM_NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@dataclass
class Answer:
    token_ids: torch.Tensor  # [1, prompt and answer]
    logits: torch.Tensor  # [NUM_NEW, vocab]
    num_loaded: int = 0
    num_computed: int = 0  # tokens of the prompt that went through the model


def plain(model: PreTrainedModel, prompt: torch.Tensor, **options: Any) -> Answer:
    output = model.generate(prompt, **GREEDY, **options)
    return Answer(output.sequences, torch.cat(output.logits))


@contextmanager
def counted(embeddings: torch.nn.Module, given: list[int]) -> Iterator[None]:
    """Add to *given* how many tokens each call embeds. Not by a hook: those change results, and are refused."""
    own = type(embeddings)

    def forward(self: torch.nn.Module, token_ids: torch.Tensor) -> object:
        given.append(token_ids.numel())
        return own.forward(self, token_ids)

    embeddings.__class__ = type(own.__name__, (own,), {"forward": forward})
    try:
        yield
    finally:
        embeddings.__class__ = own


def ask(
    cache: KVTierCache, model: PreTrainedModel, prompt: torch.Tensor, salt: str | None = None, **options: Any
) -> Answer:
    given: list[int] = []
    with counted(model.get_input_embeddings(), given), cache.prompt(prompt, salt=salt) as past:
        output = model.generate(prompt, past_key_values=past, **GREEDY, **options)
    num_computed = sum(given) - (NUM_NEW - 1)
    return Answer(output.sequences, torch.cat(output.logits), past.num_loaded_tokens, num_computed)


def assert_equal(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids.tolist() == expected.token_ids.tolist()
    assert (answer.logits - expected.logits).abs().max() <= TOLERANCE * expected.logits.abs().max()


@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_answers_are_those_of_generate_cold_cached_after_a_restart_and_for_half_a_prompt(
    tmp_path: Path, name: str
) -> None:
    model = build(name)
    prompt = prompt_of(1)
    half = torch.cat([prompt[:, : NUM_TOKENS // 2], prompt_of(2)], dim=1)
    expected, expected_half = plain(model, prompt), plain(model, half)

    with opened(tmp_path, model) as cache:
        cold, cached = ask(cache, model, prompt), ask(cache, model, prompt)
    with opened(tmp_path, model) as cache:
        restarted, shared = ask(cache, model, prompt), ask(cache, model, half)

    for answer in (cold, cached, restarted):
        assert_equal(answer, expected)
    assert_equal(shared, expected_half)
    assert [answer.num_loaded for answer in (cold, cached, restarted, shared)] == [0, WHOLE, WHOLE, 144]
    assert [answer.num_computed for answer in (cold, cached, restarted, shared)] == [
        NUM_TOKENS,
        NUM_TOKENS - WHOLE,
        NUM_TOKENS - WHOLE,
        half.shape[1] - 144,
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_answer_is_a_prefix_too(tmp_path: Path, name: str) -> None:
    """Also where its tokens, and the prompt's before them, have left a layer's window."""
    model = build(name)
    first = plain(model, prompt_of(1), min_new_tokens=NUM_NEW).token_ids
    follow_up = torch.cat([first, prompt_of(2, 20)], dim=1)

    with opened(tmp_path, model) as cache:
        ask(cache, model, prompt_of(1))
        answer = ask(cache, model, follow_up)

    assert_equal(answer, plain(model, follow_up))
    assert answer.num_loaded == (NUM_TOKENS + NUM_NEW - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_what_is_loaded_is_used(tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with other bytes the answer is another one, so equal answers show that they are right."""
    with opened(tmp_path, model) as cache:
        ask(cache, model, prompt_of(1))
        read = RowLayout.read
        monkeypatch.setattr(RowLayout, "read", lambda self, rows, layers: read(self, 0 * rows, layers))
        answer = ask(cache, model, prompt_of(1))

    assert answer.num_loaded == WHOLE
    assert answer.token_ids.tolist() != plain(model, prompt_of(1)).token_ids.tolist()


def test_a_damaged_block_is_computed_again_and_counted(tmp_path: Path, model: PreTrainedModel) -> None:
    expected = plain(model, prompt_of(1))
    with opened(tmp_path, model) as cache:
        ask(cache, model, prompt_of(1))
    computed = DynamicCache(config=model.config)
    model(prompt_of(1), past_key_values=computed)
    place = slice(5 * BLOCK_SIZE, 6 * BLOCK_SIZE)
    damage(tmp_path / "store", computed.layers[0].keys[0, 0, place].detach().numpy().tobytes())

    with opened(tmp_path, model) as cache:
        answer, again = ask(cache, model, prompt_of(1)), ask(cache, model, prompt_of(1))
        seen = cache.statistics()

    assert_equal(answer, expected)
    assert_equal(again, expected)
    assert (answer.num_loaded, again.num_loaded) == (5 * BLOCK_SIZE, WHOLE)
    assert (seen.corrupt_blocks, seen.stored_blocks) == (1, 1)


def test_salts_are_apart(tmp_path: Path, model: PreTrainedModel) -> None:
    with opened(tmp_path, model) as cache:
        loaded = [ask(cache, model, prompt_of(1), salt).num_loaded for salt in (None, "a", "b", "a", None)]

    assert loaded == [0, 0, 0, WHOLE, WHOLE]


def test_models_with_other_weights_other_settings_or_another_type_share_a_folder_and_no_block(tmp_path: Path) -> None:
    theta = LlamaForCausalLM(LlamaConfig(**{**COMMON, "rope_theta": 5e5})).eval()
    same_weights = build("llama")
    theta.load_state_dict(same_weights.state_dict())
    changed = build("llama")
    with torch.no_grad():
        changed.model.layers[0].self_attn.k_proj.weight[3, 3] += 1e-3
    models = [same_weights, changed, theta, build("llama").to(torch.bfloat16)]
    loaded = []
    for _ in range(2):
        for model in models:
            with opened(tmp_path, model) as cache:
                answer = ask(cache, model, prompt_of(1))
            loaded.append(answer.num_loaded)
            assert answer.token_ids.tolist() == plain(model, prompt_of(1)).token_ids.tolist()

    assert loaded == [0] * 4 + [WHOLE] * 4


def test_a_model_finds_its_blocks_with_another_attention_implementation(tmp_path: Path) -> None:
    for implementation, expected in (("eager", 0), ("sdpa", WHOLE)):
        model = build("llama")
        model.set_attn_implementation(implementation)
        with opened(tmp_path, model) as cache:
            assert ask(cache, model, prompt_of(1)).num_loaded == expected


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 50}, {"prompt_lookup_num_tokens": 4}], ids=["chunks", "guesses"]
)
def test_chunked_prefill_and_assisted_decoding_store_what_they_compute(
    tmp_path: Path, model: PreTrainedModel, options: dict[str, int]
) -> None:
    """Tokens that were guessed and taken back are in no block's name."""
    prompt = torch.cat([prompt_of(1, 30)] * 6, dim=1)
    expected = plain(model, prompt)

    with opened(tmp_path, model) as cache:
        with cache.prompt(prompt) as past:
            output = model.generate(prompt, past_key_values=past, max_new_tokens=NUM_NEW, do_sample=False, **options)
        follow_up = torch.cat([output, prompt_of(2, 20)], dim=1)
        answer = ask(cache, model, follow_up)

    assert output.tolist() == expected.token_ids.tolist()
    assert answer.num_loaded == (prompt.shape[1] + NUM_NEW - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert_equal(answer, plain(model, follow_up))


def test_a_prompt_shorter_than_a_block_and_one_of_whole_blocks_are_answered(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    """The last token is always computed: its logits are the first token's."""
    with opened(tmp_path, model) as cache:
        for num_tokens, expected in ((1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)):
            prompt = prompt_of(1, num_tokens)
            ask(cache, model, prompt)
            answer = ask(cache, model, prompt)
            assert_equal(answer, plain(model, prompt))
            assert answer.num_loaded == expected


def test_more_prompts_than_the_disk_has_room_for_leave_the_newest(tmp_path: Path, model: PreTrainedModel) -> None:
    with KVTierCache.open(tmp_path / "store", model, capacity="16MiB", read_timeout_s=60) as cache:
        for seed in range(6):
            with cache.prompt(prompt_of(seed, 3000)) as past:
                model.generate(prompt_of(seed, 3000), past_key_values=past, max_new_tokens=1)
            seen = cache.statistics()
            assert seen.disk_bytes <= seen.capacity_bytes
        loaded = [ask(cache, model, prompt_of(seed, 3000)).num_loaded for seed in (5, 0)]

    assert loaded[0] > loaded[1]


def test_nothing_is_stored_of_a_block_that_raises(tmp_path: Path, model: PreTrainedModel) -> None:
    with opened(tmp_path, model) as cache:
        with pytest.raises(IndexError), cache.prompt(prompt_of(1)) as past:
            model.generate(prompt_of(1), past_key_values=past, **GREEDY).sequences[1]
        assert cache.statistics().stored_blocks == 0
        assert ask(cache, model, prompt_of(1)).num_loaded == 0


def test_a_closed_cache_says_so_and_a_prompt_under_way_is_answered(tmp_path: Path, model: PreTrainedModel) -> None:
    with opened(tmp_path, model) as cache, cache.prompt(prompt_of(1)) as past:
        cache.close()
        assert model.generate(prompt_of(1), past_key_values=past, **GREEDY).sequences.shape[1] == NUM_TOKENS + NUM_NEW

    for call in (cache.statistics, cache.clear, lambda: cache.prompt(prompt_of(1)).__enter__()):
        with pytest.raises(RuntimeError, match="KVTierCache: has been closed"):
            call()


def test_what_is_cleared_is_computed(tmp_path: Path, model: PreTrainedModel) -> None:
    with opened(tmp_path, model) as cache:
        ask(cache, model, prompt_of(1))
        assert cache.clear()
        assert ask(cache, model, prompt_of(1)).num_loaded == 0


def test_a_pass_of_another_thread_that_meets_half_a_hook_is_left_alone(tmp_path: Path, model: PreTrainedModel) -> None:
    """torch enters a hook before it notes that the hook wants keywords: what a pass sees that begins between."""
    with opened(tmp_path, model) as cache, cache.prompt(prompt_of(1)):
        model._forward_pre_hooks_with_kwargs.clear()

        logits = model(input_ids=prompt_of(2)).logits

    assert torch.equal(logits, model(input_ids=prompt_of(2)).logits)


def test_threads_with_a_prompt_each_get_their_own_answers(tmp_path: Path, model: PreTrainedModel) -> None:
    prompts = [prompt_of(seed % 3, 200 + 16 * seed) for seed in range(6)]
    expected = [plain(model, prompt) for prompt in prompts]
    answers: dict[int, list[Answer]] = {}
    with opened(tmp_path, model) as cache:

        def work(number: int) -> None:
            found = []
            for _ in range(2):
                with cache.prompt(prompts[number]) as past:
                    output = model.generate(prompts[number], past_key_values=past, **GREEDY)
                found.append(Answer(output.sequences, torch.cat(output.logits), past.num_loaded_tokens))
            answers[number] = found

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = cache.statistics()

    for number, found in answers.items():
        for answer in found:
            assert_equal(answer, expected[number])
        assert found[1].num_loaded == (prompts[number].shape[1] - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert (len(answers), seen.num_prompts) == (6, 12)


MISUSES: dict[str, Callable[[PreTrainedModel, PromptCache], object]] = {
    "another prompt": lambda model, past: model.generate(prompt_of(2), past_key_values=past, **GREEDY),
    "beams": lambda model, past: model.generate(prompt_of(1), past_key_values=past, max_new_tokens=2, num_beams=2),
    "padding": lambda model, past: model(
        prompt_of(1), past_key_values=past, attention_mask=torch.tensor([[0] * 10 + [1] * (NUM_TOKENS - 10)])
    ),
    "embeddings": lambda model, past: model(
        inputs_embeds=model.get_input_embeddings()(prompt_of(1)), past_key_values=past
    ),
    "images": lambda model, past: model(prompt_of(1), past_key_values=past, pixel_values=torch.zeros(1, 3, 8, 8)),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_a_name_would_not_say_is_refused(tmp_path: Path, model: PreTrainedModel, misuse: str) -> None:
    with opened(tmp_path, model) as cache:
        with pytest.raises(ValueError, match="KVTierCache"), cache.prompt(prompt_of(1)) as past:
            MISUSES[misuse](model, past)
        assert cache.statistics().stored_blocks == 0


def test_passes_with_another_cache_are_left_alone(tmp_path: Path, model: PreTrainedModel) -> None:
    with opened(tmp_path, model) as cache:
        with cache.prompt(prompt_of(1)) as past:
            model.generate(prompt_of(1), past_key_values=past, **GREEDY)
            other = model.generate(torch.cat([prompt_of(2), prompt_of(3)]), max_new_tokens=2)
        assert other.shape[0] == 2
        assert ask(cache, model, prompt_of(2)).num_loaded == 0


def test_several_prompts_at_once_are_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    with (
        opened(tmp_path, model) as cache,
        pytest.raises(ValueError, match=r"shape \[2, 300\]"),
        cache.prompt(torch.cat([prompt_of(1), prompt_of(2)])),
    ):
        pass


def test_scaled_rope_is_served(tmp_path: Path) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 2048}
    model = LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters=parameters)).eval()
    with opened(tmp_path, model) as cache:
        ask(cache, model, prompt_of(1))
        assert_equal(ask(cache, model, prompt_of(1)), plain(model, prompt_of(1)))


def test_a_folder_that_another_cache_has_open_is_left_alone(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "INDEXED_WAIT_S", 0.0)  # the folder stays in use for all of the wait
    with opened(tmp_path, model) as first:
        ask(first, model, prompt_of(1))
        with opened(tmp_path, model) as second:
            answer = ask(second, model, prompt_of(1))
            seen = second.statistics()

    assert_equal(answer, plain(model, prompt_of(1)))
    assert (answer.num_loaded, seen.stored_blocks, seen.unstored_blocks > 0) == (0, 0, True)
