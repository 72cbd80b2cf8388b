"""A loaded model that several engines and its owner compute with: right tokens or an error, whichever closes first."""

import asyncio
import gc
from pathlib import Path

import pytest
import torch
from small_models import build, byte_tokenizer, plain_greedy
from transformers import PreTrainedModel

from kvtier.engine.async_llm import AsyncLLM
from kvtier.engine.llm import LLM
from kvtier.engine.model.errors import ChangedModel
from kvtier.engine.model.sampling import SamplingParams

NUM_NEW = 6
PROMPT = [(37 * i + 5) % 256 for i in range(300)]
OTHER = [(11 * i + 2) % 256 for i in range(200)]
GREEDY = SamplingParams(max_tokens=NUM_NEW)
SIZES: dict[str, object] = {"device": {"capacity": "1MiB"}, "host": {"capacity": "2MiB"}}


@pytest.fixture
def model() -> PreTrainedModel:
    """The small Llama, of this test alone."""
    return build("llama")


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return plain_greedy(build("llama"), PROMPT, NUM_NEW)


def engine_of(model: PreTrainedModel, disk: Path | None = None) -> LLM:
    tables = {} if disk is None else {"disk": {"path": str(disk), "capacity": "32MiB"}}
    return LLM(model, {**SIZES, **tables}, byte_tokenizer())


def answer(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY)[0].token_ids)


@pytest.mark.parametrize("end", ["closed", "collected"])
def test_an_engine_goes_on_when_another_on_its_model_has_ended(
    end: str, model: PreTrainedModel, expected: list[int]
) -> None:
    first, second = engine_of(model), engine_of(model)
    if end == "closed":
        first.close()
    del first
    gc.collect()

    assert answer(second) == expected
    assert answer(second) == expected  # cached
    second.close()


def test_the_last_engine_gives_the_model_its_own_attention_back(model: PreTrainedModel, expected: list[int]) -> None:
    own = model.config._attn_implementation
    first, second = engine_of(model), engine_of(model)
    first.close()
    assert model.config._attn_implementation == "kvtier"
    second.close()

    assert model.config._attn_implementation == own
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_NEW, do_sample=False)
    assert output[0, len(PROMPT) :].tolist() == expected


def test_what_a_second_engine_leaves_on_disk_is_right_for_later_processes(
    model: PreTrainedModel, expected: list[int], tmp_path: Path
) -> None:
    first, second = engine_of(model), engine_of(model, tmp_path / "store")
    first.close()
    answer(second)
    second.close()

    with engine_of(build("llama"), tmp_path / "store") as later:
        done = later.generate(PROMPT, GREEDY)[0]

    assert done.tokens.disk > 0
    assert list(done.token_ids) == expected


def test_attention_that_the_owner_sets_while_an_engine_has_the_model_is_an_error(
    model: PreTrainedModel, expected: list[int]
) -> None:
    with engine_of(model) as llm:
        answer(llm)
        model.set_attn_implementation("sdpa")
        with pytest.raises(ChangedModel, match="set to 'sdpa' while kvtier computes"):
            answer(llm)
        model.set_attn_implementation("kvtier")

        assert answer(llm) == expected
        llm.check()
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"  # the owner's last word


def test_attention_that_is_set_in_the_middle_of_a_pass_is_an_error(model: PreTrainedModel) -> None:
    with engine_of(model) as llm:
        layer = model.model.layers[2]
        own = type(layer).forward

        def sets_attention(*args: object, **kwargs: object) -> object:
            if args[0] is layer:
                model.set_attn_implementation("sdpa")
            return own(*args, **kwargs)

        type(layer).forward = sets_attention  # type: ignore[method-assign]
        try:
            with pytest.raises(ChangedModel, match="2 of 4 layers went through kvtier's attention"):
                answer(llm)
        finally:
            type(layer).forward = own  # type: ignore[method-assign]


def test_the_owners_own_pass_beside_an_open_engine_is_an_error_that_says_so(model: PreTrainedModel) -> None:
    with engine_of(model), pytest.raises(RuntimeError, match="works only in an open LLM; close the LLM"):
        model(torch.tensor([PROMPT]))


def test_engines_on_one_model_in_threads_of_their_own_give_right_tokens(
    model: PreTrainedModel, expected: list[int]
) -> None:
    async def ask(llm: AsyncLLM) -> list[int]:
        pieces = [piece async for piece in llm.generate(PROMPT, GREEDY, skip_reading_prefix_cache=True)]
        return [piece.token_id for piece in pieces if piece.token_id is not None]

    async def play() -> list[list[int]]:
        async with AsyncLLM(model, SIZES, byte_tokenizer()) as first:
            late = AsyncLLM(model, SIZES, byte_tokenizer())  # loads, and compares attention, beside the other's passes
            answers, _ = await asyncio.gather(asyncio.gather(*(ask(first) for _ in range(4))), late.start())
            answers += await asyncio.gather(ask(first), ask(late))
            await late.close()
            return [*answers, await ask(first)]

    answers = asyncio.run(play())

    assert answers == [expected] * len(answers)
