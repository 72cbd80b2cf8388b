"""KVTierCache and passes that tokens do not describe: nothing of them is stored, and one warning says why."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_models import VOCAB, build
from transformers import DynamicCache, PreTrainedModel

from kvtier import LLM, KVTierCache
from kvtier.connectors.transformers_cache.prompt_cache import PromptCache
from kvtier.engine.model.errors import ChangedModel

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

NUM_TOKENS, NUM_NEW, BLOCK_SIZE = 97, 4, 16
PROMPT = torch.randint(VOCAB, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
GREEDY = {"max_new_tokens": NUM_NEW, "do_sample": False}
MIN = torch.finfo(torch.float32).min


@pytest.fixture
def model() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def cache(tmp_path: Path, model: PreTrainedModel) -> Iterator[KVTierCache]:
    with KVTierCache.open(tmp_path / "store", model, capacity="64MiB", read_timeout_s=60) as cache:
        yield cache


def causal(num_tokens: int, num_keys: int) -> torch.Tensor:
    return torch.full((1, 1, num_tokens, num_keys), MIN).triu(1 + num_keys - num_tokens)


def last_token_blind(model: PreTrainedModel, past: PromptCache) -> None:
    mask = causal(NUM_TOKENS, NUM_TOKENS)
    mask[0, 0, -1, 1] = MIN  # the first elements are those of the causal mask
    model(PROMPT, past_key_values=past, attention_mask=mask)


def sees_ahead(model: PreTrainedModel, past: PromptCache) -> None:
    model(PROMPT, past_key_values=past, attention_mask=torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool))


def biased(model: PreTrainedModel, past: PromptCache) -> None:
    mask = causal(NUM_TOKENS, NUM_TOKENS)
    mask[0, 0, 50, 3] = -0.5
    model(PROMPT, past_key_values=past, attention_mask=mask)


def shifted(model: PreTrainedModel, past: PromptCache) -> None:
    model(PROMPT, past_key_values=past, position_ids=torch.arange(5, NUM_TOKENS + 5)[None])


def shifted_one_by_one(model: PreTrainedModel, past: PromptCache) -> None:
    for i in range(NUM_TOKENS):
        model(PROMPT[:, i : i + 1], past_key_values=past, position_ids=torch.tensor([[i + 100]]))


def autocast(model: PreTrainedModel, past: PromptCache) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(PROMPT, past_key_values=past)


def inner_pass(model: PreTrainedModel, past: PromptCache) -> None:
    model.model(PROMPT[:, :32], past_key_values=past)
    model.generate(PROMPT, past_key_values=past, **GREEDY)


def forward_itself(model: PreTrainedModel, past: PromptCache) -> None:
    model.forward(PROMPT[:, :32], past_key_values=past)
    model.generate(PROMPT, past_key_values=past, **GREEDY)


def cropped_and_filled_unseen(model: PreTrainedModel, past: PromptCache) -> None:
    model(PROMPT, past_key_values=past)
    past.crop(-NUM_TOKENS)
    model.model(PROMPT.flip(1), past_key_values=past)  # as long as before


def put_in_by_hand(model: PreTrainedModel, past: PromptCache) -> None:
    other = DynamicCache(config=model.config)
    model(PROMPT.flip(1), past_key_values=other)
    for layer_id, layer in enumerate(other.layers):
        past.update(layer.keys, layer.values, layer_id)


UNDESCRIBED = [
    last_token_blind,
    sees_ahead,
    biased,
    shifted,
    shifted_one_by_one,
    autocast,
    inner_pass,
    forward_itself,
    cropped_and_filled_unseen,
    put_in_by_hand,
]


@pytest.mark.parametrize("passes", UNDESCRIBED, ids=lambda passes: passes.__name__)
@torch.no_grad()
def test_nothing_is_stored_of_a_pass_that_tokens_do_not_describe(
    passes: Callable[[PreTrainedModel, PromptCache], None],
    model: PreTrainedModel,
    cache: KVTierCache,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with cache.prompt(PROMPT) as past:
        passes(model, past)

    assert cache.statistics().stored_blocks == 0
    (line,) = (it.getMessage() for it in caplog.records if "KVTierCache" in it.getMessage())
    assert "KVTierCache stores at most the first 0 tokens of this sequence: " in line


@torch.no_grad()
def test_what_came_before_such_a_pass_is_stored(model: PreTrainedModel, cache: KVTierCache) -> None:
    with cache.prompt(PROMPT) as past:
        model(PROMPT[:, :40], past_key_values=past)
        model.model(PROMPT[:, 40:], past_key_values=past)

    assert cache.statistics().stored_blocks == 40 // BLOCK_SIZE


@torch.no_grad()
def test_positions_of_generated_tokens_are_compared_too(model: PreTrainedModel, cache: KVTierCache) -> None:
    with cache.prompt(PROMPT[:, :16]) as past:
        model(PROMPT[:, :16], past_key_values=past)
        for i in range(16, 50):
            model(PROMPT[:, i : i + 1], past_key_values=past, position_ids=torch.tensor([[i + 100]]))

    assert cache.statistics().stored_blocks == 1


@torch.no_grad()
def test_the_causal_mask_itself_and_usual_positions_are_stored(model: PreTrainedModel, cache: KVTierCache) -> None:
    with cache.prompt(PROMPT) as past:
        for start, end in ((0, 60), (60, 96), (96, 97)):
            model(
                PROMPT[:, start:end],
                past_key_values=past,
                attention_mask=causal(end - start, end),
                position_ids=torch.arange(start, end)[None],
            )

    assert cache.statistics().stored_blocks == NUM_TOKENS // BLOCK_SIZE


@torch.no_grad()
@pytest.mark.parametrize(
    "more",
    [{"attention_mask": torch.zeros(1, 1, 98, 194)}, {"position_ids": torch.arange(98)[None]}],
    ids=["mask", "positions"],
)
def test_a_loaded_prefix_is_not_continued_by_a_pass_that_would_have_computed_another(
    more: dict[str, torch.Tensor], model: PreTrainedModel, cache: KVTierCache
) -> None:
    longer = torch.cat([PROMPT, PROMPT.flip(1)], dim=1)
    with cache.prompt(PROMPT) as past:
        model.generate(PROMPT, past_key_values=past, **GREEDY)

    refused = pytest.raises(ValueError, match="has loaded 96 tokens that a plain pass computed")
    with cache.prompt(longer) as past, refused:
        model(longer[:, 96:], past_key_values=past, **more)


def test_in_autocast_nothing_is_loaded(
    model: PreTrainedModel, cache: KVTierCache, caplog: pytest.LogCaptureFixture
) -> None:
    with cache.prompt(PROMPT) as past:
        model.generate(PROMPT, past_key_values=past, **GREEDY)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(PROMPT, **GREEDY)
        with cache.prompt(PROMPT) as past:
            found = model.generate(PROMPT, past_key_values=past, **GREEDY)
            assert past.num_loaded_tokens == 0

    assert torch.equal(found, expected)
    assert "torch.autocast computes it in another dtype" in caplog.text


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_tokens_that_are_cropped_below_the_loaded_prefix_are_not_stored_wrongly(family: str, tmp_path: Path) -> None:
    model = build(family)
    with KVTierCache.open(tmp_path / "of_one", model, capacity="64MiB", read_timeout_s=60) as cache:
        with cache.prompt(PROMPT[:, :36]) as past:  # less than Mistral's window: more of it could not be cropped
            model(PROMPT[:, :36], past_key_values=past)
        with cache.prompt(PROMPT) as past:
            assert past.num_loaded_tokens == 32
            past.crop(-16)
            model(PROMPT[:, 16:], past_key_values=past)
        with cache.prompt(PROMPT) as past:
            found = model(PROMPT[:, past.num_loaded_tokens :], past_key_values=past).logits[0, -1]

    expected = model(PROMPT).logits[0, -1]
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


@torch.no_grad()
def test_a_model_that_is_changed_is_neither_asked_nor_stored(
    model: PreTrainedModel, cache: KVTierCache, caplog: pytest.LogCaptureFixture
) -> None:
    with cache.prompt(PROMPT) as past:
        model.generate(PROMPT, past_key_values=past, **GREEDY)
        model.lm_head.weight.data += 0.1

    assert "the model was changed since KVTierCache.open: lm_head.weight" in caplog.text
    assert cache.statistics().stored_blocks == 0
    with pytest.raises(ChangedModel, match="open the cache anew"), cache.prompt(PROMPT):
        pass


def test_in_training_mode_it_is_not_asked(model: PreTrainedModel, cache: KVTierCache) -> None:
    model.train()
    with pytest.raises(ChangedModel, match="training mode"), cache.prompt(PROMPT):
        pass


def test_a_model_that_an_engine_has_says_so(model: PreTrainedModel, cache: KVTierCache, tmp_path: Path) -> None:
    from small_models import byte_tokenizer

    sizes = {"device": {"capacity": "1MiB"}, "host": {"capacity": 0}}
    with LLM(model, sizes, byte_tokenizer()):
        with pytest.raises(ChangedModel, match="close the LLM"), cache.prompt(PROMPT) as past:
            model.generate(PROMPT, past_key_values=past, **GREEDY)
        with pytest.raises(ChangedModel, match="close the LLM"):
            KVTierCache.open(tmp_path / "another", model)
    with cache.prompt(PROMPT) as past:
        model.generate(PROMPT, past_key_values=past, **GREEDY)
    assert cache.statistics().stored_blocks > 0


def test_in_a_forked_process_it_says_so_and_disturbs_nothing(model: PreTrainedModel, cache: KVTierCache) -> None:
    with cache.prompt(PROMPT) as past:
        model.generate(PROMPT, past_key_values=past, **GREEDY)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            cache.close()
            cache.prompt(PROMPT).__enter__()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as read:
        assert "KVTierCache: this process was forked" in read.read()

    with cache.prompt(PROMPT) as past:
        assert past.num_loaded_tokens == 96
