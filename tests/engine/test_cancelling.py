"""A task that waits for the engine can be cancelled at any point: the engine goes on, or ends, as a whole."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import aclosing
from itertools import count
from pathlib import Path

import pytest
import small_models
from async_play import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    NUM_SLOTS,
    completion_of,
    greedy,
    is_at_rest,
    opened,
    prompt_of,
    read,
)
from cancelling import cancelled_at
from small_models import byte_tokenizer
from transformers import PreTrainedModel

from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.core import EngineCore

DEADLINE_S = 600.0  # reached only when something waits for ever
LATE = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])


def play(story: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(story, DEADLINE_S))


def device_only(model: PreTrainedModel) -> AsyncEngine:
    """An engine without host memory: no copies, so that at rest nothing is leased."""
    device = {"capacity": NUM_SLOTS * BLOCK_BYTES, "block_size": BLOCK_SIZE}
    scheduler = {"prefill_chunk": 64, "token_budget": 128}
    return AsyncEngine(model, {"device": device, "host": {"capacity": 0}, "scheduler": scheduler}, byte_tokenizer())


@pytest.mark.long
@LATE
def test_a_start_that_is_cancelled_ends_and_leaves_the_store_to_the_next(
    model: PreTrainedModel, tmp_path: Path, late: bool
) -> None:
    async def story() -> None:
        for number in count():
            llm = opened(model, tmp_path)
            was_cancelled = await cancelled_at(llm.start(), number, late=late)
            if was_cancelled:
                with pytest.raises(RuntimeError, match="has ended"):
                    await read(llm.generate("Say hello.", greedy()))
                with pytest.raises(RuntimeError, match="create a new one"):
                    await llm.start()
            await llm.close()
            if not was_cancelled:
                break

        assert number > 0
        async with opened(model, tmp_path) as again:
            assert completion_of(await read(again.generate("Say hello.", greedy()))).token_ids

    play(story())


@pytest.mark.long
@LATE
def test_a_close_that_is_cancelled_goes_on_and_the_next_one_waits_for_it(
    model: PreTrainedModel, tmp_path: Path, late: bool
) -> None:
    async def story() -> None:
        for number in count():
            llm = opened(model, tmp_path)
            await llm.start()
            await read(llm.generate(prompt_of(number, 100), greedy()))

            was_cancelled = await cancelled_at(llm.close(), number, late=late)
            await llm.close()

            async with opened(model, tmp_path) as again:
                done = completion_of(await read(again.generate(prompt_of(number, 100), greedy())))
            assert done.tokens.disk == 96
            if not was_cancelled:
                break
        assert number > 0

    play(story())


@LATE
def test_a_stream_that_is_cancelled_anywhere_leases_nothing(model: PreTrainedModel, late: bool) -> None:
    async def reading(llm: AsyncEngine, seed: int) -> None:
        async with aclosing(llm.generate(prompt_of(seed, 100), greedy(6))) as stream:
            async for _ in stream:
                pass

    async def story() -> None:
        async with device_only(model) as llm:
            for number in count():
                was_cancelled = await cancelled_at(reading(llm, number), number, late=late)

                assert await llm.ask(is_at_rest)
                await llm.ask(lambda core: core.cache.check())
                if not was_cancelled:
                    break
            assert number > 0  # on a busy machine all pieces may come at once

    play(story())


async def ask(llm: AsyncEngine) -> None:
    await llm.ask(lambda core: core.cache.check())


async def ask_wrongly(llm: AsyncEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        await llm.ask(lambda core: 1 // 0)


async def tokenize(llm: AsyncEngine) -> None:
    await llm.with_tokenizer(lambda tokenizer: tokenizer("text"))


async def reset(llm: AsyncEngine) -> None:
    await llm.reset_prefix_cache()


@pytest.mark.long
@LATE
@pytest.mark.parametrize("wait", [ask, ask_wrongly, tokenize, reset])
def test_the_engine_goes_on_when_a_question_is_cancelled(
    model: PreTrainedModel, wait: Callable[[AsyncEngine], Coroutine[object, object, None]], late: bool
) -> None:
    async def story() -> None:
        async with device_only(model) as llm:
            for number in count():
                was_cancelled = await cancelled_at(wait(llm), number, late=late)

                assert len(completion_of(await read(llm.generate("Say hello.", greedy()))).token_ids) == 8
                if not was_cancelled:
                    break
            assert number > 0

    play(story())


def test_a_task_that_waits_for_the_end_and_is_cancelled_does_not_end_it(model: PreTrainedModel) -> None:
    async def story() -> None:
        async with device_only(model) as llm:
            assert await cancelled_at(llm.wait_end(), 0, late=False)

            assert len(completion_of(await read(llm.generate("Say hello.", greedy()))).token_ids) == 8

    play(story())


@LATE
def test_what_is_to_be_looked_after_and_whose_asker_was_cancelled_is_ended_and_not_called_any_more(
    model: PreTrainedModel, late: bool
) -> None:
    calls: list[str] = []

    class Attendant:
        def __init__(self, core: EngineCore) -> None:
            calls.append("made")

        def tick(self) -> None:
            calls.append("tick")

        def end(self) -> None:
            calls.append("end")

    async def story() -> None:
        async with device_only(model) as llm:
            assert await cancelled_at(llm.add_attendant(Attendant), 0, late=late)
            await llm.ask(lambda core: None)
            assert calls[-1:] == ([] if "made" not in calls else ["end"])
            calls.clear()
            await read(llm.generate("Say hello.", greedy()))

        assert not calls

    play(story())


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, GeneratorExit, asyncio.CancelledError, CancelledError])
def test_whatever_a_question_raises_reaches_its_asker_and_the_engine_goes_on(
    model: PreTrainedModel, kind: type[BaseException]
) -> None:
    def fail(_: EngineCore) -> None:
        raise kind("of the question")

    async def story() -> None:
        async with device_only(model) as llm:
            with pytest.raises(RuntimeError, match=f"{kind.__name__}: of the question"):
                await llm.ask(fail)
            assert len(completion_of(await read(llm.generate("Say hello.", greedy()))).token_ids) == 8

    play(story())


def test_a_prompt_that_wants_to_end_the_engine_ends_itself(model: PreTrainedModel) -> None:
    class Unusual(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise SystemExit("of the prompt")

    async def story() -> None:
        async with device_only(model) as llm:
            with pytest.raises(RuntimeError, match="SystemExit: of the prompt"):
                await read(llm.generate(Unusual([1, 2, 3]), greedy()))
            assert len(completion_of(await read(llm.generate("Say hello.", greedy()))).token_ids) == 8

    play(story())


def test_an_engine_outlives_the_event_loop_of_a_stream_that_was_never_closed(model: PreTrainedModel) -> None:
    llm, loop = device_only(model), asyncio.new_event_loop()
    loop.run_until_complete(llm.start())
    stream = llm.generate(prompt_of(1, 100), greedy(1000))
    loop.run_until_complete(anext(stream))
    loop.close()

    async def story() -> None:
        assert len(completion_of(await read(llm.generate("Say hello.", greedy()))).token_ids) == 8
        await llm.close()

    play(story())


def test_what_a_step_raises_ends_every_stream_and_question_and_closes_the_engine(
    model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        llm = opened(model, tmp_path)
        await llm.start()
        stream = llm.generate(prompt_of(1, 100), greedy(2000))
        await anext(stream)

        def spoil(core: EngineCore) -> None:
            core.step = spoiled

        def spoiled() -> None:
            raise SystemExit("out of order")

        await llm.ask(spoil)
        with pytest.raises(RuntimeError, match="out of order"):
            await read(stream)
        with pytest.raises(RuntimeError, match=r"has ended|the engine failed"):
            await llm.ask(is_at_rest)
        await llm.close()

        async with opened(model, tmp_path) as again:
            assert completion_of(await read(again.generate("Say hello.", greedy()))).token_ids

    play(story())
    caplog.clear()  # the error's traceback has both engines, with their memory and sockets


PROGRAM = """
import asyncio, sys
from small_models import build, byte_tokenizer
from kvtier import AsyncLLM, SamplingParams

async def cancelled(work):
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

async def main():
    small = {"capacity": "8MiB"}
    disk = {"path": sys.argv[1], "capacity": "64MiB"}
    config = {"device": small, "host": small, "disk": disk, "scheduler": {"load": "always"}}
    llm = AsyncLLM(build("llama"), config, byte_tokenizer())
    if sys.argv[2] == "start":
        await cancelled(llm.start())
    else:
        await llm.start()
        async for piece in llm.generate("Say hello. " * 20, SamplingParams(max_tokens=3)):
            pass
        await cancelled(llm.close())
    print("done", flush=True)

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("what", ["start", "close"])
def test_a_program_whose_start_or_close_was_cancelled_ends_and_leaves_a_whole_store(
    model: PreTrainedModel, tmp_path: Path, what: str
) -> None:
    paths = [str(Path(small_models.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), what]

    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False)

    assert (ended.returncode, ended.stdout) == (0, "done\n")

    async def story() -> None:
        async with opened(model, tmp_path) as llm:
            done = completion_of(await read(llm.generate("Say hello. " * 20, greedy())))
            assert len(done.token_ids) == 8

    play(story())
