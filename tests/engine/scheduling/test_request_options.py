"""RequestOptions: how one request may use the cache."""

from pathlib import Path

import pytest
from equal_answers import BLOCK_SIZE, GREEDY, NUM_NEW, configuration, prompt_of
from small_models import byte_tokenizer, plain_greedy
from transformers import PreTrainedModel

from kvtier import LLM
from kvtier.engine.scheduling.request import RequestOptions
from kvtier.tiers.naming.tier import Reason


@pytest.mark.long
@pytest.mark.parametrize("num_blocks", [0, 5, 18, 1000])
def test_no_more_is_loaded_than_was_asked_for(model: PreTrainedModel, tmp_path: Path, num_blocks: int) -> None:
    prompt, tables = prompt_of(1), configuration(tmp_path, 2.0, 2.0)
    with LLM(model, tables, byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
    with LLM(model, tables, byte_tokenizer()) as llm:
        limit = num_blocks * BLOCK_SIZE + 7
        first, again = (llm.generate(prompt, GREEDY, max_load_tokens=limit)[0] for _ in range(2))
        llm.check()

    hit = 18 * BLOCK_SIZE
    loaded = min(hit, num_blocks * BLOCK_SIZE)
    assert first.token_ids == again.token_ids == plain_greedy(model, prompt, NUM_NEW)
    assert (first.tokens.disk, first.tokens.reasons.get(Reason.SKIPPED, 0)) == (loaded, hit - loaded)
    assert again.tokens.disk == again.tokens.host == 0  # the device has it, and that costs nothing


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="max_load_tokens is -1"):
        RequestOptions(max_load_tokens=-1)


@pytest.mark.parametrize("priority", ["high", None, 0.5])
def test_a_priority_that_the_queue_cannot_compare_is_refused(priority: object) -> None:
    with pytest.raises(ValueError, match=r"priority is .*; give a whole number"):
        RequestOptions(priority=priority)
