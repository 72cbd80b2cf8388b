"""The records of requests, as an engine and a server make them."""

import asyncio
import time

import pytest
from serving import tables
from small_models import build, byte_tokenizer

from kvtier import LLM, SamplingParams
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.scheduling.request import RequestOptions
from kvtier.engine.scheduling.timeline import Caller
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Tier

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPT = list(range(5, 105))


def test_a_request_that_ended_has_a_record_that_adds_up() -> None:
    with LLM(build("llama"), tables(), byte_tokenizer()) as llm:
        before = time.time()
        llm.generate([PROMPT], GREEDY)
        llm.generate([PROMPT], GREEDY)

        again, first = llm.core.records.newest()

    assert first.tokens.num_tokens == again.tokens.num_tokens == len(PROMPT)
    assert (first.coldest, again.coldest) == (None, Tier.DEVICE)
    assert (again.num_generated, again.finish_reason) == (4, "length")
    assert before - 1 <= first.arrived_at <= again.arrived_at
    for record in (first, again):
        assert record.queue_s is not None
        assert record.load_s is not None
        assert record.ttft_s is not None
        assert record.total_s is not None
        assert 0 <= record.queue_s <= record.queue_s + record.load_s <= record.ttft_s <= record.total_s


def test_the_engine_tells_what_tiers_of_other_sizes_would_find() -> None:
    with LLM(build("llama"), tables(), byte_tokenizer()) as llm:
        assert llm.core.statistics.requests.what_if == {}

        llm.generate([PROMPT, PROMPT[:90]], GREEDY)
        llm.generate([PROMPT], GREEDY)

        tokens, what_if = llm.core.statistics.tokens, llm.core.statistics.requests.what_if
    share = (tokens.num_tokens - tokens.recomputed) / tokens.num_tokens
    assert what_if.keys() == {Tier.DEVICE, Tier.HOST}
    assert {tier: each[1.0] for tier, each in what_if.items()} == pytest.approx(dict.fromkeys(what_if, share), rel=0.01)


def test_prompts_that_were_not_looked_up_ask_for_nothing() -> None:
    with LLM(build("llama"), tables(), byte_tokenizer()) as llm:
        llm.generate([PROMPT], GREEDY, skip_reading_prefix_cache=True)

        assert llm.core.statistics.tokens.recomputed == len(PROMPT)
        assert llm.core.statistics.requests.what_if == {}


def test_a_request_that_was_aborted_in_the_queue_has_a_record_of_its_caller() -> None:
    with LLM(build("llama"), tables(), byte_tokenizer()) as llm:
        caller = Caller("asked", "tenant", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        request = llm.core.add(PROMPT, GREEDY, NO_EXTRA_KEYS, time.monotonic(), RequestOptions(), caller)

        llm.core.abort(request)
        llm.core.abort(request)

        records = llm.core.records.newest()
    assert [(each.request_id, each.tenant, each.traceparent) for each in records] == [
        ("asked", "tenant", caller.traceparent)
    ]
    assert (records[0].finish_reason, records[0].ttft_s, records[0].tokens.recomputed) == ("abort", None, len(PROMPT))


def test_the_engine_in_its_own_thread_records_its_callers() -> None:
    async def ask() -> list[str]:
        async with AsyncEngine(build("llama"), tables(), byte_tokenizer()) as llm:
            async for _ in llm.generate(PROMPT, GREEDY, caller=Caller("mine")):
                pass
            return await llm.ask(lambda core: [each.request_id for each in core.records.newest()])

    assert asyncio.run(ask()) == ["mine"]
