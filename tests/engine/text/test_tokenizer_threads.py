"""Tokenizing for many tenants: in turns, and not for callers that have left."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest
from small_models import byte_tokenizer

from kvtier.engine.sharing.turns import FairShare, Turns
from kvtier.engine.text.tokenizer_threads import TokenizerThreads

DEADLINE_S = 60.0  # reached only when a test fails


def within_deadline(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


async def come_true(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_no_tenant_has_all_threads_however_much_it_asks_for() -> None:
    async def story() -> None:
        threads, gate = TokenizerThreads(byte_tokenizer(), 2), threading.Event()
        threads.share_among(2)
        greedy = [asyncio.create_task(threads.run(lambda _: gate.wait(DEADLINE_S), "greedy")) for _ in range(5)]
        await come_true(lambda: threads.num_waiting == 4)

        modest = await threads.run(lambda tokenizer: tokenizer("ab")["input_ids"], "modest")

        assert len(modest) == 2
        assert not any(task.done() for task in greedy)
        gate.set()
        await asyncio.gather(*greedy)
        threads.close()

    within_deadline(story)


def test_a_tenant_alone_has_all_threads() -> None:
    async def story() -> None:
        threads, together = TokenizerThreads(byte_tokenizer(), 2), threading.Barrier(2)

        await asyncio.gather(*(threads.run(lambda _: together.wait(DEADLINE_S)) for _ in range(2)))

        threads.close()

    within_deadline(story)


def test_a_job_whose_caller_has_left_before_its_turn_is_never_begun() -> None:
    async def story() -> None:
        threads, gate, done = TokenizerThreads(byte_tokenizer(), 1), threading.Event(), []
        first = asyncio.create_task(threads.run(lambda _: gate.wait(DEADLINE_S)))
        leaving = [asyncio.create_task(threads.run(lambda _: done.append("leaving"))) for _ in range(3)]
        await come_true(lambda: threads.num_waiting == 3)

        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        assert threads.num_waiting == 0
        gate.set()
        await threads.run(lambda _: done.append("staying"))

        assert done == ["staying"]
        await first
        threads.close()

    within_deadline(story)


def test_a_job_whose_caller_leaves_in_the_middle_keeps_its_thread_until_it_is_done() -> None:
    async def story() -> None:
        threads, gate, began = TokenizerThreads(byte_tokenizer(), 1), threading.Event(), threading.Event()
        leaving = asyncio.create_task(threads.run(lambda _: began.set() or gate.wait(DEADLINE_S)))
        await come_true(began.is_set)

        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        next_one = asyncio.create_task(threads.run(lambda _: "done"))
        await asyncio.sleep(0)
        assert (threads.num_running, threads.num_waiting) == (1, 1)
        gate.set()

        assert await next_one == "done"
        threads.close()

    within_deadline(story)


def test_a_caller_that_waits_for_a_turn_when_they_are_closed_is_refused() -> None:
    async def story() -> None:
        threads, gate = TokenizerThreads(byte_tokenizer(), 1), threading.Event()
        first = asyncio.create_task(threads.run(lambda _: gate.wait(DEADLINE_S)))
        waiting = [asyncio.create_task(threads.run(lambda _: None)) for _ in range(3)]
        await come_true(lambda: threads.num_waiting == 3)

        threads.close()
        gate.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [RuntimeError] * 3
        assert await first

    within_deadline(story)


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, GeneratorExit, asyncio.CancelledError, CancelledError])
def test_whatever_a_job_raises_reaches_its_caller_and_frees_its_thread(kind: type[BaseException]) -> None:
    def fail(_: object) -> None:
        raise kind("of the job")

    async def story() -> None:
        threads = TokenizerThreads(byte_tokenizer(), 1)

        with pytest.raises(RuntimeError, match=f"{kind.__name__}: of the job"):
            await threads.run(fail)

        assert await threads.run(lambda _: "done") == "done"
        threads.close()

    within_deadline(story)


def test_a_tenant_with_one_job_passes_those_with_many() -> None:
    async def story() -> None:
        turns, served = Turns(FairShare(1, 3)), []

        async def job(tenant: str) -> None:
            await turns.take(tenant)
            served.append(tenant)
            turns.give_back(tenant)

        await turns.take("first")
        jobs = [asyncio.create_task(job(tenant)) for tenant in ("a", "a", "a", "b", "c", "c")]
        await come_true(lambda: turns.num_waiting == len(jobs))
        turns.give_back("first")
        await asyncio.gather(*jobs)

        assert served == ["a", "b", "c", "a", "c", "a"]

    within_deadline(story)


@pytest.mark.parametrize("num_tenants", [1, 2, 5])
def test_places_are_never_more_than_there_are_and_never_lost(num_tenants: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")

    async def story() -> None:
        rng, turns = random.Random(seed), Turns(FairShare(3, num_tenants))
        inside: Counter[int] = Counter()

        async def job(tenant: int, num_steps: int) -> None:
            await turns.take(str(tenant))
            inside[tenant] += 1
            try:
                assert inside.total() <= 3
                assert inside[tenant] <= turns.share.max_of_one
                for _ in range(num_steps):
                    await asyncio.sleep(0)
            finally:
                inside[tenant] -= 1
                turns.give_back(str(tenant))

        jobs = []
        for _ in range(400):
            jobs.append(asyncio.create_task(job(rng.randrange(num_tenants), rng.randrange(4))))
            if rng.random() < 0.3:
                rng.choice(jobs).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)

        assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
        assert (turns.num_taken, turns.num_waiting) == (0, 0)

    within_deadline(story)
