"""kvtier's engine on a real `kvtier sidecar`: the same tokens as without, also when the sidecar dies and comes back."""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from document_tables import BLOCK_BYTES, BLOCK_SIZE, CHUNK
from engine_sidecar import started_sidecar
from foreign.running import Sidecar
from kv_router import EventStream
from small_models import VOCAB, build, byte_tokenizer
from transformers import PreTrainedModel
from waiting import DEADLINE_S, wait_for

from kvtier import LLM, Completion, SamplingParams
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.scheduling.request import Request
from kvtier.server.documents.documents import Documents
from kvtier.server.documents.draft import Draft
from kvtier.server.documents.worker import Status
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.up.load_planner import LoadPlan

pytestmark = pytest.mark.long

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
DOCUMENT_TOKENS = 640


@pytest.fixture
def socket(tmp_path: Path) -> str:
    return str(tmp_path / "own.sock")


@pytest.fixture
def sidecar(tmp_path: Path, socket: str) -> Iterator[Sidecar]:
    with started_sidecar(tmp_path, socket) as running:
        yield running


def configuration(socket: str | None, num_slots: int = 60, **tables: object) -> dict[str, object]:
    """An engine with so many device slots: on the sidecar, or with the device alone."""
    below = {"host": {"capacity": 0}} if socket is None else {"sidecar": f"unix://{socket}"}
    return {
        "device": {"capacity": num_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "scheduler": {"prefill_chunk": CHUNK, "token_budget": 2 * CHUNK, "load": "always"},
        **below,
        **tables,
    }


def engine(model: PreTrainedModel, socket: str | None, num_slots: int = 60, **tables: object) -> LLM:
    return LLM(model, configuration(socket, num_slots, **tables), byte_tokenizer())


def prompt_of(seed: int, num_tokens: int = DOCUMENT_TOKENS + 9) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def ask(llm: LLM, prompt: list[int], **options: object) -> Completion:
    return llm.generate(prompt, GREEDY, **options)[0]


def alone(model: PreTrainedModel, *prompts: list[int]) -> list[list[int]]:
    """The tokens that the engine answers to each prompt without any cache below."""
    with engine(model, None) as llm:
        return [ask(llm, prompt).token_ids for prompt in prompts]


def is_attached(llm: LLM) -> bool:
    standing = llm.statistics().sidecar
    assert standing is not None, "an engine without a sidecar"
    return standing.is_attached


def until_found(llm: LLM, prompt: list[int]) -> None:
    """Wait until the sidecar has told the engine of nearly all of the prompt's blocks."""

    def is_found() -> bool:
        llm.statistics()  # which takes in what was told
        return llm.where(prompt)["nowhere"] <= 0.05 * len(prompt)

    wait_for(is_found)


def add(llm: LLM, prompt: list[int]) -> Request:
    return llm.core.add(prompt, GREEDY, NO_EXTRA_KEYS, time.monotonic())


def finish(llm: LLM, requests: list[Request]) -> list[list[int]]:
    """Step the engine until all requests have their tokens."""
    give_up_at = time.monotonic() + DEADLINE_S
    while llm.core.has_work:
        llm.core.step()
        assert time.monotonic() < give_up_at, "a request hangs"
    return [request.completion().token_ids for request in requests]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_second_engine_finds_what_the_first_has_computed_while_both_live(
    sidecar: Sidecar, socket: str, name: str
) -> None:
    model = build(name)
    document, question = prompt_of(1), [*prompt_of(1), 7, 8, 9]
    expected = alone(model, document, question)

    with engine(model, socket) as first, engine(model, socket, num_slots=80) as second:
        cold = ask(first, document)
        until_found(second, document)
        warm = ask(second, question)
        first.check()
        second.check()

    assert [cold.token_ids, warm.token_ids] == expected
    assert warm.tokens.host >= 0.95 * DOCUMENT_TOKENS
    assert cold.tokens.recomputed == len(document)


def test_a_call_ends_with_what_it_computed_copied_down(sidecar: Sidecar, socket: str, model: PreTrainedModel) -> None:
    prompt = prompt_of(20)
    with engine(model, socket) as llm, engine(model, socket) as other:
        llm.generate(prompt, SamplingParams(max_tokens=1))

        until_found(other, prompt)  # the first is not stepped any more

        assert llm.core.cache.lower.status.spill_progress().num_done == DOCUMENT_TOKENS // BLOCK_SIZE


def test_an_engine_that_is_stepped_copies_all_down_far_from_eviction(
    sidecar: Sidecar, socket: str, model: PreTrainedModel
) -> None:
    prompt = prompt_of(21)
    with engine(model, socket, num_slots=1000) as llm:
        finish(llm, [add(llm, prompt)])

        wait_for(lambda: llm.statistics().cache.tiers[Tier.HOST].num_blocks == DOCUMENT_TOKENS // BLOCK_SIZE)


def test_slots_that_hold_nothing_may_be_poisoned(sidecar: Sidecar, socket: str) -> None:
    model, prompts = build("gemma3"), [prompt_of(seed, 300) for seed in (22, 23, 24)]
    expected = alone(model, *prompts)
    device = {"capacity": 30 * BLOCK_BYTES, "block_size": BLOCK_SIZE, "poison": True}
    with engine(model, socket, device=device) as llm:
        answers = [ask(llm, prompt) for prompt in [*prompts, *prompts]]

    assert [answer.token_ids for answer in answers] == expected * 2
    assert answers[-1].tokens.host + answers[-1].tokens.disk > 0


def test_an_engine_in_another_process_finds_it_too(
    sidecar: Sidecar, socket: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    prompt = prompt_of(2)
    program = f"""
from kvtier import LLM, SamplingParams
with LLM({str(folder)!r}, {configuration(socket, num_slots=100)!r}) as llm:
    while llm.statistics() and llm.where({prompt!r})["host"] < {DOCUMENT_TOKENS}:
        pass
    done = llm.generate({prompt!r}, SamplingParams(max_tokens=6, ignore_eos=True))[0]
    print(done.tokens.host, done.token_ids)
"""
    with engine(model, socket) as llm:
        first = ask(llm, prompt)

        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_S
        )

    num_hits, _, token_ids = ran.stdout.strip().partition(" ")
    assert int(num_hits) >= 0.95 * DOCUMENT_TOKENS
    assert token_ids == str(first.token_ids)


def test_what_an_engine_computed_outlives_it_and_the_sidecar(
    sidecar: Sidecar, socket: str, model: PreTrainedModel
) -> None:
    prompts = [prompt_of(seed, 300) for seed in range(5)]
    with engine(model, socket, num_slots=30) as llm:
        first = [ask(llm, prompt) for prompt in prompts]

    with engine(model, socket) as llm:
        from_host = [ask(llm, prompt) for prompt in prompts]
    assert sidecar.stop() == 0
    sidecar.start()
    with engine(model, socket) as llm:
        from_disk = [ask(llm, prompt) for prompt in prompts]

    assert [each.tokens.recomputed for each in first] == [300] * 5
    assert [each.tokens.host for each in from_host] == [288] * 5
    assert [each.tokens.disk for each in from_disk] == [288] * 5
    assert [each.token_ids for each in from_host] == [each.token_ids for each in first]
    assert [each.token_ids for each in from_disk] == [each.token_ids for each in first]


def test_an_engine_serves_before_its_sidecar_is_there_and_attaches_once_it_is(
    tmp_path: Path, socket: str, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(3)
    expected = alone(model, prompt)
    with engine(model, socket) as llm:
        without = ask(llm, prompt)
        told = [record.getMessage() for record in caplog.records if "sidecar" in record.getMessage()]
        assert not is_attached(llm)

        with started_sidecar(tmp_path, socket):
            wait_for(lambda: is_attached(llm))
            ask(llm, prompt_of(4, 40))  # copies down what the device had, too: there is room beside it
            with engine(model, socket) as other:
                until_found(other, prompt)
                found = ask(other, prompt)

    assert len(told) == 1
    assert "serving without it" in told[0]
    assert [without.token_ids, found.token_ids] == expected * 2
    assert found.tokens.host >= 0.95 * DOCUMENT_TOKENS
    assert "is attached; it is used from now on" in caplog.text


def test_an_engine_that_the_sidecar_refuses_does_not_start(
    sidecar: Sidecar, socket: str, model: PreTrainedModel
) -> None:
    device = {"capacity": "8MiB", "block_size": 1000}

    with pytest.raises(ValueError, match=r"sidecar .*: .*a block has 1024000 bytes, but an extent") as refused:
        engine(model, socket, device=device)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 7])
def test_a_sidecar_that_is_killed_during_requests_costs_no_token(
    sidecar: Sidecar, socket: str, model: PreTrainedModel, num_steps: int
) -> None:
    prompts = [prompt_of(5, 400), prompt_of(6, 300), prompt_of(7, 200)]
    expected = alone(model, *prompts)
    with engine(model, socket, num_slots=30) as llm:
        for prompt in prompts:
            ask(llm, prompt)
        requests = [add(llm, prompt) for prompt in prompts]
        for _ in range(num_steps):
            llm.core.step()

        sidecar.kill()
        assert finish(llm, requests) == expected
        wait_for(lambda: not is_attached(llm))
        assert [ask(llm, prompt).token_ids for prompt in prompts] == expected

        sidecar.start()
        wait_for(lambda: is_attached(llm))
        assert [ask(llm, prompt).token_ids for prompt in prompts] == expected
        llm.check()
        standing = llm.statistics().sidecar

    assert standing is not None
    assert standing.num_attached == 2


def test_a_sidecar_that_starts_again_while_requests_run_is_used_by_the_next_ones(
    sidecar: Sidecar, socket: str, model: PreTrainedModel
) -> None:
    prompt = prompt_of(8)
    with engine(model, socket) as llm:
        first = ask(llm, prompt)
        requests = [add(llm, prompt_of(seed, 400)) for seed in (9, 10)]
        llm.core.step()
        sidecar.kill()
        sidecar.start()
        finish(llm, requests)
        wait_for(lambda: is_attached(llm))
        ask(llm, prompt)  # what the device has without a copy below is copied again

        with engine(model, socket) as other:
            until_found(other, prompt)
            found = ask(other, prompt)

    assert found.token_ids == first.token_ids
    assert found.tokens.recomputed < 0.05 * DOCUMENT_TOKENS


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_sidecar_that_is_stopped_is_waited_for_a_moment_only(
    sidecar: Sidecar, socket: str, model: PreTrainedModel, num_steps: int
) -> None:
    prompts = [prompt_of(11, 400), prompt_of(12, 300)]
    expected = alone(model, *prompts)
    with engine(model, socket, num_slots=30) as llm:
        for prompt in prompts:
            ask(llm, prompt)
        requests = [add(llm, prompt) for prompt in prompts]
        for _ in range(num_steps):
            llm.core.step()

        sidecar.pause()
        try:
            assert finish(llm, requests) == expected
            assert [ask(llm, prompt).token_ids for prompt in prompts] == expected
        finally:
            sidecar.go_on()
        wait_for(lambda: is_attached(llm))
        assert [ask(llm, prompt).token_ids for prompt in prompts] == expected
        llm.check()


def test_tenants_do_not_share_and_the_sidecar_has_their_quotas(
    tmp_path: Path, socket: str, model: PreTrainedModel
) -> None:
    prompt = prompt_of(13)
    names = {"tenants": {"ann": {"name": "Ann"}}}
    with (
        started_sidecar(tmp_path, socket, f'[tenants.ann]\nhost = "{10 * BLOCK_BYTES}"\n'),
        engine(model, socket, **names) as first,
        engine(model, socket, **names) as second,
    ):
        ask(first, prompt, cache_salt="ann")
        ask(first, prompt, cache_salt="bob")
        wait_for(lambda: second.statistics() and second.where(prompt, cache_salt="bob")["nowhere"] < 0.05 * len(prompt))
        of_ann = ask(second, prompt, cache_salt="ann")
        of_bob = ask(second, prompt, cache_salt="bob")
        of_eve = ask(second, prompt, cache_salt="eve")
        wait_for(lambda: 0 < first.statistics().tenants["Ann"]["host"] <= 10 * BLOCK_BYTES)

    assert of_eve.tokens.recomputed == len(prompt)
    assert of_bob.tokens.host + of_bob.tokens.disk >= 0.95 * DOCUMENT_TOKENS
    assert of_ann.token_ids == of_bob.token_ids == of_eve.token_ids


def test_what_the_planner_would_not_load_from_the_sidecar_is_explained_as_too_costly(
    sidecar: Sidecar, socket: str, model: PreTrainedModel
) -> None:
    document = prompt_of(30)
    with engine(model, socket) as first:
        ask(first, document)

    with engine(model, socket, scheduler={"load": "cost"}) as llm:
        until_found(llm, document)
        llm.core.planner.best = lambda demand, *_: LoadPlan(0, int(demand.ends[len(demand.ends) // 2]))
        found = llm.core.explain_prompt(llm.core.chain(document, NO_EXTRA_KEYS)).explanation()

    (loaded, computed, *_) = found.rows
    assert loaded.tier in (Tier.HOST, Tier.DISK)
    assert (computed.start, computed.why) == (DOCUMENT_TOKENS // 2, Reason.COST)


def test_events_tell_of_all_tiers_and_of_what_others_store(
    sidecar: Sidecar, socket: str, model: PreTrainedModel
) -> None:
    events = {"events": {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}}
    with engine(model, socket, **events) as llm:
        stream = EventStream(llm.core.publisher.endpoint, llm.core.publisher.replay_endpoint)

        def media() -> set[str]:
            llm.statistics()
            for batch in stream.read(llm.core.publisher.next_seq):
                heard.update((type(event).__name__, event.medium, len(event.block_hashes)) for event in batch.events)
            return {medium for _, medium, _ in heard}

        heard: set[tuple[str, str, int]] = set()
        with engine(model, socket) as other:
            ask(other, prompt_of(14))
        wait_for(lambda: media() == {"CPU", "STORAGE"})
        ask(llm, prompt_of(15))
        wait_for(lambda: media() == {"GPU", "CPU", "STORAGE"})
        heard.clear()
        sidecar.kill()
        wait_for(lambda: {"CPU", "STORAGE"} <= media())
        stream.close()

    assert {kind for kind, _, _ in heard} == {"BlockRemoved"}


def test_a_pinned_document_is_warm_again_after_the_sidecar_was_killed(
    sidecar: Sidecar, socket: str, model: PreTrainedModel
) -> None:
    token_ids = prompt_of(16, DOCUMENT_TOKENS)

    async def story() -> None:
        async with AsyncEngine(model, configuration(socket), byte_tokenizer()) as llm:
            documents = await Documents.open(llm, llm.config, lambda document: document.cache_salt, num_tenants=1)
            draft = Draft(None, token_ids=token_ids, system=None, form=None, lora=None, cache_salt=None)
            document, _ = await documents.put(None, "report", draft)

            async def until(status: Status, num_host_tokens: int = 0) -> None:
                give_up_at = time.monotonic() + DEADLINE_S
                while True:
                    where = await documents.residence(document)
                    found = await llm.ask(lambda core: core.cache.lower.find(0, chain.names).tolist())
                    if where.status is status and sum(place >= 0 for place in found) >= num_host_tokens / BLOCK_SIZE:
                        return
                    assert time.monotonic() < give_up_at, f"the document is {where}"
                    await asyncio.sleep(0.01)

            chain = await llm.ask(lambda core: core.chain(token_ids, NO_EXTRA_KEYS))
            await until(Status.READY)
            await documents.pin(document, 3600.0)
            await until(Status.READY, DOCUMENT_TOKENS)

            sidecar.kill()
            sidecar.start()
            await until(Status.READY, DOCUMENT_TOKENS)  # again in host memory, of another process
            await llm.ask(lambda core: core.check())
            await documents.close()

    asyncio.run(asyncio.wait_for(story(), 2 * DEADLINE_S))


def test_resetting_forgets_what_is_in_the_sidecar(sidecar: Sidecar, socket: str, model: PreTrainedModel) -> None:
    prompt = prompt_of(17)
    with engine(model, socket) as llm, engine(model, socket) as other:
        ask(llm, prompt)
        assert llm.reset_prefix_cache()

        of_llm, of_other = ask(llm, prompt), ask(other, prompt_of(17, 30))

    assert of_llm.tokens.recomputed == len(prompt)
    assert of_other.tokens.num_tokens == 30
