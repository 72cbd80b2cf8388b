"""Structured outputs in the engine: valid in batches, with hits, adapters and parameters, and after a preemption."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import jsonschema
import pytest
from lora_adapters import ADAPTERS, save_adapter
from small_models import build, byte_tokenizer

from kvtier import LLM, AsyncLLM, Completion, FinishReason, SamplingParams, StreamChunk, StructuredOutputs
from kvtier.engine.model.sampling import InvalidParameter
from kvtier.engine.model.structured.grammar import Grammar
from kvtier.engine.model.structured.grammars import Grammars
from kvtier.engine.scheduling.request import Request
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
TOKENIZER = byte_tokenizer()
DEADLINE_S = 180.0  # reached only when a test fails
PROMPT = "Who wrote it, and when? Answer in JSON. "
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 8},
        "year": {"type": "integer", "minimum": 1450, "maximum": 2026},
        "authors": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
                    "alive": {"type": "boolean"},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
        },
        "price": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "maximum": 99}]},
    },
    "required": ["title", "year", "authors"],
    "additionalProperties": False,
}
# A model with random weights likes blanks as well as anything.
NO_BLANKS = {TOKENIZER(blank)["input_ids"][0]: -100.0 for blank in " \n\r\t"}


def config_of(num_slots: int = 400, **others: object) -> dict[str, object]:
    device = {"capacity": num_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE}
    return {"device": device, "host": {"capacity": 0}, **others}


def params_of(asked: StructuredOutputs, seed: int = 0, **others: object) -> SamplingParams:
    settings = {"max_tokens": 400, "temperature": 1.0, "logit_bias": NO_BLANKS, **others}
    return SamplingParams(**settings, seed=seed, structured_outputs=asked)


def together(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Completion]:
    """The answers to prompts of different parameters, asked at once."""
    requests = [
        llm.core.add(TOKENIZER(prompt)["input_ids"], each, NO_EXTRA_KEYS, 0.0)
        for prompt, each in zip(prompts, params, strict=True)
    ]
    finish(llm, requests)
    return [request.completion() for request in requests]


def finish(llm: LLM, requests: Sequence[Request]) -> int:
    """Step until all have ended; the number of times that one of them went back to the queue."""
    num_preempted = 0
    while llm.core.has_work:
        llm.core.step()
        num_preempted += sum(bool(request.generated) for request in llm.core.scheduler.waiting)
    llm.check()
    return num_preempted


def assert_valid(completion: Completion, schema: dict[str, object] = BOOK) -> None:
    assert completion.finish_reason == FinishReason.STOP
    jsonschema.validate(json.loads(completion.text), schema)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(build("llama"), config_of(), TOKENIZER) as llm:
        yield llm


def test_every_answer_of_a_batch_is_valid_beside_answers_without_a_schema(llm: LLM) -> None:
    structured = [params_of(StructuredOutputs(json=BOOK), seed) for seed in range(24)]
    free = [SamplingParams(max_tokens=60, temperature=1.0, seed=seed) for seed in range(4)]

    completions = together(llm, [PROMPT] * 28, [*structured, *free])

    for completion in completions[:24]:
        assert_valid(completion)
    assert len({completion.text for completion in completions}) == 28
    assert [completion.finish_reason for completion in completions[24:]] == [FinishReason.LENGTH] * 4


def test_answers_are_valid_whatever_else_is_asked_for(llm: LLM) -> None:
    others: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"top_p": 0.5, "min_p": 0.01},
        {"top_k": 1},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
        {"logit_bias": {**NO_BLANKS, **dict.fromkeys(range(0, 90, 7), 100.0)}},
        {"bad_words": ["{", "true", "title", '"', "a"]},
        {"min_tokens": 390},
        {"ignore_eos": True, "stop_token_ids": [3]},
        {"logprobs": 2},
    ]

    completions = together(
        llm, [PROMPT] * len(others), [params_of(StructuredOutputs(json=BOOK), 5, **other) for other in others]
    )

    for completion in completions:
        assert_valid(completion)


def test_an_answer_that_is_complete_ends_without_an_end_token(llm: LLM) -> None:
    params = params_of(StructuredOutputs(choice=["yes", "no"]), min_tokens=10)

    [completion] = together(llm, [PROMPT], [params])

    assert completion.text in ("yes", "no")
    assert completion.finish_reason == FinishReason.STOP
    assert len(completion.token_ids) == len(completion.text)


def test_an_answer_that_max_tokens_cut_is_the_beginning_of_one(llm: LLM) -> None:
    whole, cut = (
        together(llm, [PROMPT], [params_of(StructuredOutputs(json=BOOK), 1, max_tokens=limit)])[0]
        for limit in (400, 15)
    )

    assert cut.finish_reason == FinishReason.LENGTH
    assert cut.text == whole.text[: len(cut.text)]


def test_a_stop_string_ends_an_answer_before_it_is_complete(llm: LLM) -> None:
    [completion] = together(llm, [PROMPT], [params_of(StructuredOutputs(json=BOOK), 2, stop=",")])

    assert completion.stop == ","
    assert completion.text.startswith('{"title":')


def test_an_answer_is_the_same_when_its_prompt_is_cached(llm: LLM) -> None:
    params = params_of(StructuredOutputs(json=BOOK), 3)
    prompt = "A prompt that nobody else here has, and of several blocks. " + PROMPT

    cold, hit = (together(llm, [prompt], [params])[0] for _ in range(2))

    assert hit.text == cold.text
    assert hit.tokens.recomputed < cold.tokens.recomputed


def test_the_models_end_token_ends_an_answer_where_it_may_end() -> None:
    model = build("llama")
    model.generation_config.eos_token_id = TOKENIZER("~")["input_ids"][0]
    with LLM(model, config_of(), TOKENIZER) as llm:
        asked = StructuredOutputs(regex="[a-c~]{3,12}")
        completions = together(llm, [PROMPT] * 30, [params_of(asked, seed) for seed in range(30)])

    assert all(re.fullmatch("[a-c]{3,12}", completion.text) for completion in completions)
    assert {len(completion.text) for completion in completions} > {3, 4}
    assert all(completion.finish_reason == FinishReason.STOP for completion in completions)


def test_a_preempted_request_goes_on_in_its_grammar() -> None:
    asked = StructuredOutputs(regex="(first|second) [a-z]{60} (done|end)")

    def answers(num_slots: int) -> tuple[list[str], int]:
        with LLM(build("llama"), config_of(num_slots), TOKENIZER) as llm:
            prompts = [f"{number} {PROMPT}" for number in range(6)]
            requests = [
                llm.core.add(TOKENIZER(prompt)["input_ids"], params_of(asked, seed, max_tokens=100), NO_EXTRA_KEYS, 0.0)
                for seed, prompt in enumerate(prompts)
            ]
            num_preempted = finish(llm, requests)
            return [request.completion().text for request in requests], num_preempted

    alone, never = answers(200)
    crowded, num_preempted = answers(20)

    assert num_preempted > never == 0
    assert crowded == alone
    assert all(re.fullmatch("(first|second) [a-z]{60} (done|end)", text) for text in crowded)


def test_an_adapter_and_its_base_model_answer_validly(tmp_path: Path) -> None:
    folder = save_adapter(build("llama"), tmp_path, **ADAPTERS["mlp"])
    with LLM(build("llama"), config_of(lora={"mlp": {"path": str(folder)}}), TOKENIZER) as llm:
        texts = set()
        for name in (None, "mlp"):
            [completion] = llm.generate(PROMPT, params_of(StructuredOutputs(json=BOOK), 4), lora=name)
            assert_valid(completion)
            texts.add(completion.text)

    assert len(texts) == 2


def test_what_cannot_be_compiled_is_refused_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="structured_outputs cannot be used"):
        llm.generate(PROMPT, params_of(StructuredOutputs(regex="(")))

    assert together(llm, [PROMPT], [params_of(StructuredOutputs(choice=["fine"]))])[0].text == "fine"


def test_an_answer_that_cannot_go_on_in_its_grammar_is_aborted() -> None:
    model = build("llama")
    model.generation_config.eos_token_id = TOKENIZER("~")["input_ids"][0]  # the only token with which it could
    with LLM(model, config_of(), TOKENIZER) as llm:
        requests = [params_of(StructuredOutputs(regex="ab~")), SamplingParams(max_tokens=8)]
        stuck, other = together(llm, [PROMPT] * 2, requests)

    assert (stuck.text, stuck.finish_reason) == ("ab", FinishReason.ABORT)
    assert other.finish_reason == FinishReason.LENGTH


def test_while_a_grammar_is_compiled_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    compiled = Grammars.compile

    def compile_slowly(grammars: Grammars, asked: StructuredOutputs) -> Grammar:
        has_begun.set()
        assert may_end.wait(DEADLINE_S)
        return compiled(grammars, asked)

    async def last_of(pieces: AsyncIterator[StreamChunk]) -> Completion:
        *_, last = [piece async for piece in pieces]
        assert last.completion is not None
        return last.completion

    async def answers() -> list[Completion]:
        async with AsyncLLM(build("llama"), config_of(), TOKENIZER) as llm:
            slow = asyncio.create_task(last_of(llm.generate(PROMPT, params_of(StructuredOutputs(choice=["fine"])))))
            assert await asyncio.to_thread(has_begun.wait, DEADLINE_S)
            other = await last_of(llm.generate(PROMPT, SamplingParams(max_tokens=8)))
            may_end.set()
            return [await slow, other]

    monkeypatch.setattr(Grammars, "compile", compile_slowly)
    slow, other = asyncio.run(answers())

    assert slow.text == "fine"
    assert other.finish_reason == FinishReason.LENGTH


def test_many_callers_at_once_stream_valid_answers() -> None:
    async def answer(llm: AsyncLLM, seed: int) -> str:
        pieces = [piece async for piece in llm.generate(PROMPT, params_of(StructuredOutputs(json=BOOK), seed))]
        assert pieces[-1].completion is not None
        assert_valid(pieces[-1].completion)
        assert "".join(piece.text for piece in pieces) == pieces[-1].completion.text
        return pieces[-1].completion.text

    async def answers() -> list[str]:
        async with AsyncLLM(build("llama"), config_of(), TOKENIZER) as llm:
            with pytest.raises(InvalidParameter):
                await anext(llm.generate(PROMPT, params_of(StructuredOutputs(regex="("))))
            return await asyncio.gather(*(answer(llm, seed) for seed in range(8)))

    assert len(set(asyncio.run(answers()))) == 8
