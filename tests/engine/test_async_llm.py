"""AsyncLLM: many streams at once, each as if it were alone, also when another stream is closed early."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import small_models
from async_play import (
    BLOCK_SIZE,
    DEADLINE_S,
    NUM_SLOTS,
    completion_of,
    greedy,
    is_at_rest,
    opened,
    play,
    prompt_of,
    read,
)
from small_models import VOCAB, plain_greedy
from transformers import PreTrainedModel

from kvtier import FinishReason
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.core import EngineCore
from kvtier.transfer.block_memory import CpuMemory

T = TypeVar("T")
PROCESS_TIMEOUT_S = 300.0  # for what takes seconds


async def come_true(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S / 2
    while not condition():
        assert time.monotonic() < until, "it never came true"
        await asyncio.sleep(0.005)


def test_many_streams_at_once_give_each_the_tokens_of_being_alone(model: PreTrainedModel) -> None:
    prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in enumerate((5, 200, 33, 64, 150, 16, 90, 7, 48, 120))]
    expected = [plain_greedy(model, prompt, 12) for prompt in prompts]

    async def story() -> None:
        async with opened(model) as llm:
            streams = await asyncio.gather(*(read(llm.generate(prompt, greedy(12))) for prompt in prompts))

        for pieces, prompt, tokens in zip(streams, prompts, expected, strict=True):
            done = completion_of(pieces)
            assert [piece.token_id for piece in pieces] == done.token_ids == tokens
            assert done.tokens.num_tokens == len(prompt)

    play(story())


@pytest.mark.parametrize("stop", [(), ("lo", "zz")])
def test_the_texts_of_the_pieces_join_to_the_text_of_the_completion(model: PreTrainedModel, stop: tuple[str]) -> None:
    async def story() -> None:
        async with opened(model) as llm:
            for seed in range(4):
                pieces = await read(llm.generate(f"Say hello, ship {seed}.", greedy(40, stop=stop)))

                assert "".join(piece.text for piece in pieces) == completion_of(pieces).text

    play(story())


def test_a_stop_string_ends_the_stream_before_itself(model: PreTrainedModel) -> None:
    async def story() -> None:
        async with opened(model) as llm:
            text = completion_of(await read(llm.generate("Say hello.", greedy(40)))).text
            stop = text[12:15]

            pieces = await read(llm.generate("Say hello.", greedy(40, stop=stop)))

        assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
        assert completion_of(pieces).finish_reason is FinishReason.STOP

    play(story())


def test_salts_and_skipping_work_as_in_llm(model: PreTrainedModel) -> None:
    prompt = prompt_of(1, 100)

    async def hit(llm: AsyncEngine, **options: object) -> int:
        return completion_of(await read(llm.generate(prompt, greedy(2), **options))).tokens.device

    async def story() -> None:
        async with opened(model) as llm:
            hits = [
                await hit(llm, cache_salt="ann"),
                await hit(llm, cache_salt="ann"),
                await hit(llm, cache_salt="bob"),
                await hit(llm),
                await hit(llm, skip_reading_prefix_cache=True),
                await hit(llm),
            ]

        assert hits == [0, 99, 0, 0, 0, 99]

    play(story())


def test_a_reset_is_refused_while_a_request_runs(model: PreTrainedModel) -> None:
    async def story() -> None:
        async with opened(model) as llm:
            stream = llm.generate(prompt_of(1, 100), greedy(200))
            await anext(stream)
            refused = await llm.reset_prefix_cache()
            await read(stream)
            done = await llm.reset_prefix_cache()
            again = completion_of(await read(llm.generate(prompt_of(1, 100), greedy())))

        assert (refused, done, again.tokens.device) == (False, True, 0)

    play(story())


def test_a_reset_is_not_refused_because_copies_end_while_it_asks(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, may_copy = threading.Event(), threading.Event()
    to_host = CpuMemory.to_host

    def held_to_host(memory: CpuMemory, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        assert may_copy.wait(DEADLINE_S)
        to_host(memory, device_slots, host_slots)

    class Asked(AsyncEngine):
        """An engine whose copies end right after the first answer to the reset."""

        async def ask(self, question: Callable[[EngineCore], T]) -> T:
            answer = await super().ask(question)
            if is_asked.is_set() and not may_copy.is_set():
                may_copy.set()
                while await super().ask(lambda core: core.cache.num_in_flight):
                    await asyncio.sleep(0)
            return answer

    async def story() -> None:
        async with opened(model, make=Asked) as llm:
            await read(llm.generate(prompt_of(1, 100), greedy()))
            while not await llm.ask(lambda core: core.cache.num_in_flight):
                await asyncio.sleep(0)
            is_asked.set()
            done = await llm.reset_prefix_cache()
            again = completion_of(await read(llm.generate(prompt_of(1, 100), greedy())))

        assert (done, again.tokens.device, again.tokens.host) == (True, 0, 0)

    monkeypatch.setattr(CpuMemory, "to_host", held_to_host)
    play(story())


@pytest.mark.parametrize("how", ["break", "cancel", "aclose", "cancel at once"])
def test_leaving_a_stream_early_frees_its_leases_and_disturbs_no_other(model: PreTrainedModel, how: str) -> None:
    stays = prompt_of(1, 60)
    expected = plain_greedy(model, stays, 40)

    async def leave(llm: AsyncEngine) -> None:
        stream = llm.generate(prompt_of(2, 300), greedy(1000))
        begun = asyncio.Event()

        async def reader() -> None:
            async for _ in stream:
                begun.set()

        match how:
            case "cancel at once" | "cancel":
                task = asyncio.create_task(reader())
                await (begun.wait() if how == "cancel" else asyncio.sleep(0))
                task.cancel()
            case "break" | "aclose":
                async for _ in stream:
                    break
                if how == "aclose":
                    await stream.aclose()

    async def story() -> None:
        async with opened(model) as llm:
            other = asyncio.create_task(read(llm.generate(stays, greedy(40))))
            await leave(llm)
            assert completion_of(await other).token_ids == expected

            while not await llm.ask(is_at_rest):  # a look after each of the engine's steps
                pass
            await llm.ask(lambda core: core.cache.check())
            await come_true(lambda: llm.statistics().num_running == 0)

    play(story())


def test_a_prompt_that_cannot_run_is_a_value_error_of_its_own_stream_only(model: PreTrainedModel) -> None:
    stays = prompt_of(1, 60)
    expected = plain_greedy(model, stays, 20)

    async def story() -> None:
        async with opened(model) as llm:
            other = asyncio.create_task(read(llm.generate(stays, greedy(20))))
            with pytest.raises(ValueError, match=r"raise device\.capacity or shorten the prompt"):
                await read(llm.generate(prompt_of(2, NUM_SLOTS * BLOCK_SIZE), greedy()))
            with pytest.raises(ValueError, match="is empty"):
                await read(llm.generate("", greedy()))

            assert completion_of(await other).token_ids == expected

    play(story())


@pytest.mark.parametrize("token_id", [VOCAB, -1])
def test_a_token_id_that_the_model_does_not_know_is_a_value_error_of_its_own_stream_only(
    model: PreTrainedModel, token_id: int
) -> None:
    stays = prompt_of(1, 60)
    expected = plain_greedy(model, stays, 20)

    async def story() -> None:
        async with opened(model) as llm:
            other = asyncio.create_task(read(llm.generate(stays, greedy(20))))
            with pytest.raises(ValueError, match=str(token_id)):
                await read(llm.generate([*prompt_of(2, 20), token_id], greedy()))

            assert completion_of(await other).token_ids == expected

    play(story())


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_salt": "a\ud800"},
        {"cache_salt": "a\ud800", "prompt": prompt_of(2, 20)},
        {"cache_salt": 7},
        {"prompt": "Say \udfff."},
        {"priority": "high"},
    ],
    ids=["salt", "salt of token ids", "no salt", "prompt", "priority"],
)
def test_what_would_end_a_step_with_an_error_is_a_value_error_of_its_own_stream_only(
    model: PreTrainedModel, wrong: dict[str, object]
) -> None:
    stays = prompt_of(1, 60)
    expected = plain_greedy(model, stays, 20)

    async def story() -> None:
        async with opened(model) as llm:
            other = asyncio.create_task(read(llm.generate(stays, greedy(20))))
            options = dict(wrong)
            with pytest.raises(ValueError, match=r"give|remove"):
                await read(llm.generate(options.pop("prompt", "Say hello. " * 20), greedy(), **options))

            assert completion_of(await other).token_ids == expected

    play(story())


def test_a_full_queue_is_a_value_error(model: PreTrainedModel) -> None:
    async def story() -> None:
        async with opened(model, max_waiting=1, max_running=1) as llm:
            runs = asyncio.create_task(read(llm.generate(prompt_of(1, 60), greedy(3000))))
            await come_true(lambda: llm.statistics().num_running == 1)
            waits = asyncio.create_task(read(llm.generate(prompt_of(2, 60), greedy())))
            await come_true(lambda: llm.statistics().num_waiting == 1)

            with pytest.raises(ValueError, match=r"raise scheduler\.max_waiting"):
                await read(llm.generate(prompt_of(3, 60), greedy()))

            runs.cancel()
            assert len(completion_of(await waits).token_ids) == 8

    play(story())


def test_use_before_the_start_is_a_runtime_error_in_one_line(model: PreTrainedModel) -> None:
    async def story() -> None:
        llm = opened(model)

        with pytest.raises(RuntimeError, match="not started") as from_generate:
            await read(llm.generate("Say hello."))
        with pytest.raises(RuntimeError, match="not started"):
            llm.statistics()

        assert "\n" not in str(from_generate.value)
        await llm.close()

    play(story())


def test_use_after_the_end_is_a_runtime_error_in_one_line(model: PreTrainedModel) -> None:
    async def story() -> None:
        async with opened(model) as llm:
            await read(llm.generate("Say hello.", greedy()))

        with pytest.raises(RuntimeError, match="has ended") as from_generate:
            await read(llm.generate("Say hello."))
        with pytest.raises(RuntimeError, match="has ended"):
            llm.statistics()

        assert "\n" not in str(from_generate.value)

    play(story())


def test_closing_twice_does_nothing_more(model: PreTrainedModel, tmp_path: Path) -> None:
    async def story() -> None:
        llm = opened(model, tmp_path)
        await llm.start()
        await read(llm.generate("Say hello.", greedy()))

        await llm.close()
        await llm.close()

    play(story())


def test_closing_ends_running_streams_with_an_error_and_no_hang(model: PreTrainedModel) -> None:
    async def story() -> None:
        llm = opened(model)
        await llm.start()
        tasks = [asyncio.create_task(read(llm.generate(prompt_of(seed, 60), greedy(2000)))) for seed in range(3)]
        await come_true(lambda: llm.statistics().num_running == 3)

        await llm.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEADLINE_S / 4)

        for outcome in outcomes:
            assert isinstance(outcome, RuntimeError)
            assert "closed" in str(outcome)

    play(story())


def test_closing_ends_a_stream_that_was_only_just_asked_for(model: PreTrainedModel) -> None:
    async def story() -> None:
        llm = opened(model)
        await llm.start()
        task = asyncio.create_task(read(llm.generate("Say hello. " * 50_000, greedy())))
        await asyncio.sleep(0)  # its prompt is being tokenized now, and will be for a while

        await llm.close()
        (outcome,) = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), DEADLINE_S / 4)

        assert isinstance(outcome, RuntimeError)

    play(story())


def test_the_event_loop_goes_on_while_the_model_computes(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes, loop_goes_on = threading.Event(), threading.Event()
    compute = type(model).forward

    def take_long(*args: object, **kwargs: object) -> object:
        computes.set()
        assert loop_goes_on.wait(DEADLINE_S), "the event loop waits for the model"
        return compute(*args, **kwargs)

    async def story() -> None:
        async with opened(model) as llm:
            monkeypatch.setattr(type(model), "forward", take_long)
            reading = asyncio.create_task(read(llm.generate(prompt_of(1, 60), greedy(1))))
            await come_true(computes.is_set)
            loop_goes_on.set()
            assert completion_of(await reading).finish_reason is FinishReason.LENGTH

    play(story())


@pytest.mark.long
def test_what_streams_have_read_is_on_disk_after_the_end(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = prompt_of(1, 100)

    async def story() -> None:
        async with opened(model, tmp_path) as llm:
            first = completion_of(await read(llm.generate(prompt, greedy())))
        async with opened(model, tmp_path) as llm:
            second = completion_of(await read(llm.generate(prompt, greedy())))

        assert (first.tokens.disk, second.tokens.disk) == (0, 96)
        assert first.token_ids == second.token_ids

    play(story())


@pytest.mark.long
def test_a_second_engine_on_one_store_serves_without_it_and_leaves_it_to_the_first(
    model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with opened(model, tmp_path) as first:
            async with opened(model, tmp_path) as second:
                (said,) = caplog.messages
                assert f"is open in process {os.getpid()};" in said
                assert completion_of(await read(second.generate("Say hello.", greedy()))).token_ids
            assert completion_of(await read(first.generate("Say hello.", greedy()))).token_ids

        async with opened(model, tmp_path) as again:
            assert completion_of(await read(again.generate("Say hello.", greedy()))).token_ids

    play(story())


@pytest.mark.long
def test_a_program_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from small_models import build, byte_tokenizer
from kvtier import AsyncLLM, SamplingParams

async def main():
    small = {"capacity": "8MiB"}
    disk = {"path": sys.argv[1], "capacity": "64MiB"}
    config = {"device": small, "host": small, "disk": disk, "scheduler": {"load": "always"}}
    llm = AsyncLLM(build("llama"), config, byte_tokenizer())
    await llm.start()
    async for piece in llm.generate("Say hello. " * 20, SamplingParams(max_tokens=3)):
        pass
    print("done", flush=True)

asyncio.run(main())
"""
    paths = [str(Path(small_models.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(tmp_path / "store")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "done\n"
            process.wait(DEADLINE_S / 2)
        finally:
            process.kill()

    assert process.returncode == 0
