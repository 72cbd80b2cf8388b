"""Calls on an engine by threads, after its end, and in processes that were forked: an answer or an error, at once."""

import asyncio
import copy
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_models import build, byte_tokenizer, plain_greedy
from transformers import PreTrainedModel

from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.async_llm import AsyncLLM
from kvtier.engine.llm import LLM
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.one_caller import OneCaller

NUM_NEW = 4
PROMPTS = [[(37 * i + seed) % 256 for i in range(200)] for seed in range(3)]
GREEDY = SamplingParams(max_tokens=NUM_NEW)
SIZES: dict[str, object] = {"device": {"capacity": "1MiB"}, "host": {"capacity": "2MiB"}}
ALARM_S = 120  # after which a child that hangs is ended by a signal

CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(PROMPTS[0], GREEDY),
    "where": lambda llm: llm.where(PROMPTS[0]),
    "reset": lambda llm: llm.reset_prefix_cache(),
    "statistics": lambda llm: llm.statistics(),
    "check": lambda llm: llm.check(),
}


@pytest.fixture(params=["no disk", "disk"])
def llm(request: pytest.FixtureRequest, model: PreTrainedModel, tmp_path: Path) -> Iterator[LLM]:
    disk = {} if request.param == "no disk" else {"disk": {"path": str(tmp_path / "store"), "capacity": "16MiB"}}
    with LLM(model, {**SIZES, **disk}, byte_tokenizer()) as llm:
        llm.generate(PROMPTS[0], GREEDY)
        yield llm


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Do *work* in a forked process; its exit status, and the error that it raised in words."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(ALARM_S)
        try:
            work()
        except Exception as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reader) as read:
        return status, read.read()


@pytest.mark.parametrize("call", CALLS)
def test_after_close_every_call_is_an_error(call: str, model: PreTrainedModel) -> None:
    llm = LLM(model, SIZES, byte_tokenizer())
    llm.close()

    with pytest.raises(RuntimeError, match="LLM: has been closed; create a new one"):
        CALLS[call](llm)
    with pytest.raises(RuntimeError, match="closed"):
        llm.core.step()


def test_every_call_in_a_forked_process_is_an_error_that_says_so(llm: LLM) -> None:
    for name, call in CALLS.items():
        status, said = in_child(lambda call=call: call(llm))  # type: ignore[misc]
        assert status == 0, name
        assert "RuntimeError: LLM: this process was forked after process" in said, name
    assert in_child(llm.close) == (0, "")


def test_a_forked_process_that_closes_or_drops_it_disturbs_nothing(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)

    def close_all() -> None:
        llm.close()
        llm.core.close()
        llm._closer()  # noqa: SLF001  what the interpreter calls at exit
        assert llm.core.runner.model.config._attn_implementation == "kvtier", "the child has closed the engine"

    assert in_child(close_all) == (0, "")
    again = llm.generate(PROMPTS, GREEDY)
    llm.check()

    assert [it.token_ids for it in again] == [it.token_ids for it in expected]
    assert all(it.tokens.recomputed <= 16 for it in again)


def test_an_async_engine_in_a_forked_process_says_so_and_lets_it_end(model: PreTrainedModel) -> None:
    async def play() -> None:
        async with AsyncEngine(model, SIZES, byte_tokenizer()) as llm:

            async def ask() -> list[object]:
                return [piece async for piece in llm.generate(PROMPTS[0], GREEDY)]

            def ask_in_child() -> None:
                asyncio.set_event_loop(None)
                asyncio.events._set_running_loop(None)  # noqa: SLF001  the parent's, which runs in this thread
                asyncio.run(ask())

            status, said = in_child(ask_in_child)
            assert status == 0
            assert "AsyncLLM: this process was forked" in said
            assert in_child(llm._thread.end_at_exit) == (0, "")  # noqa: SLF001  what the interpreter calls at exit
            assert len(await ask()) == NUM_NEW

    asyncio.run(play())


def test_threads_that_call_at_once_each_get_their_own_answer(llm: LLM, model: PreTrainedModel) -> None:
    answers: dict[int, list[int]] = {}
    start = threading.Barrier(len(PROMPTS))

    def ask(number: int) -> None:
        start.wait()
        for _ in range(3):
            answers[number] = list(llm.generate(PROMPTS[number], GREEDY)[0].token_ids)
            llm.where(PROMPTS[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llm.check()

    plain = build("llama")
    assert answers == {number: plain_greedy(plain, prompt, NUM_NEW) for number, prompt in enumerate(PROMPTS)}


def test_a_call_within_a_call_of_the_same_thread_is_an_error() -> None:
    calls = OneCaller("LLM")
    with calls:
        with pytest.raises(RuntimeError, match="called from within one of its own calls"), calls:
            pass
        with pytest.raises(RuntimeError, match="called from within one of its own calls"):
            calls.close(sys.exit)
    calls.close(lambda: None)


def test_a_call_that_waits_while_another_closes_is_an_error() -> None:
    calls, waits, failed = OneCaller("LLM"), threading.Event(), threading.Event()

    def call() -> None:
        waits.set()
        try:
            with calls:
                pass
        except RuntimeError:
            failed.set()

    late = threading.Thread(target=call)

    def close() -> None:
        late.start()
        waits.wait()

    calls.close(close)
    late.join()

    assert failed.is_set()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied_or_pickled(duplicate: Callable[[object], object], llm: LLM) -> None:
    with pytest.raises(TypeError, match="create one in each process"):
        duplicate(llm)
    with pytest.raises(TypeError, match="create one in each process"):
        duplicate(AsyncLLM(build("llama"), SIZES, byte_tokenizer()))


def test_an_async_engine_answers_on_the_event_loops_of_other_threads(model: PreTrainedModel) -> None:
    answers: list[list[int | None]] = []

    async def play() -> None:
        async with AsyncLLM(model, SIZES, byte_tokenizer()) as llm:

            async def ask(prompt: list[int]) -> None:
                answers.append([piece.token_id async for piece in llm.generate(prompt, GREEDY)])

            await asyncio.gather(ask(PROMPTS[0]), asyncio.to_thread(lambda: asyncio.run(ask(PROMPTS[0]))))

    asyncio.run(play())

    assert answers == [plain_greedy(build("llama"), PROMPTS[0], NUM_NEW)] * 2
