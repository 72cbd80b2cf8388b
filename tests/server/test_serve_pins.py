"""Prompts that a request pins in host memory for a while."""

from collections.abc import Iterator

import pytest
from serving import BLOCK_SIZE, MODEL, ServerInThread, come_true, serving, tables
from small_models import build

PROMPT = list(range(1, 10 * BLOCK_SIZE + 2))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerInThread]:
    with serving(build("llama"), tables(num_slots=40)) as address:
        yield address


def held_bytes(server: ServerInThread) -> int:
    return server.ask(lambda core: core.cache.pins.max_bytes - core.cache.pins.free_bytes)


def asked(server: ServerInThread, prompt: list[int], **options: object) -> dict:
    return server.complete(prompt, max_tokens=2, kvtier=options)["kvtier"]


def test_a_pinned_prompt_outlives_what_flushes_host_memory_and_is_let_go_when_its_time_is_over(
    server: ServerInThread,
) -> None:
    assert asked(server, PROMPT, pin=True, ttl_s=600)["pinned"]
    assert held_bytes(server) > 0
    for number in range(12):  # more than device and host hold
        asked(server, [100 + number] * 12 * BLOCK_SIZE)

    again = asked(server, PROMPT, pin=True, ttl_s=0.05)

    assert again["tokens"]["recomputed"] == 1
    assert "pinned" not in asked(server, PROMPT)
    come_true(lambda: held_bytes(server) == 10 * BLOCK_SIZE * 1024)  # of the first pin
    server.ask(lambda core: core.cache.check())


def test_without_room_the_answer_says_that_nothing_is_pinned(server: ServerInThread) -> None:
    long = [7] * 30 * BLOCK_SIZE

    assert asked(server, long, pin=True)["pinned"] is False


def test_a_stream_says_it_with_its_usage(server: ServerInThread) -> None:
    options = {"kvtier": {"pin": True, "ttl_s": 0.05}, "stream_options": {"include_usage": True}, "max_tokens": 2}
    with server.streaming([9] * 3 * BLOCK_SIZE, **options) as events:
        *_, last = events

    assert last["kvtier"]["pinned"] is True


def test_a_time_without_a_pin_is_refused(server: ServerInThread) -> None:
    answer = server.post("/v1/completions", json={"model": MODEL, "prompt": "a", "kvtier": {"ttl_s": 60}})

    assert answer.status_code == 400
    assert "set pin to true" in answer.json()["error"]["message"]


def test_what_one_tenant_pins_neither_takes_anothers_share_nor_tells_of_it() -> None:
    keys = {"sk-ann-1111": "ann", "sk-bob-2222": "bob"}

    def num_pinned(server: ServerInThread, key: str, first: int) -> int:
        """How many prompts of three blocks the tenant can pin."""
        pinned = 0
        for number in range(first, first + 8):
            prompt = [number] * (3 * BLOCK_SIZE + 1)
            pinned += server.complete(prompt, key, max_tokens=1, kvtier={"pin": True})["kvtier"]["pinned"]
        return pinned

    with serving(build("llama"), tables(num_slots=40), keys) as server:
        of_ann, of_bob = (num_pinned(server, key, first) for key, first in zip(keys, (1, 100), strict=True))
        server.ask(lambda core: core.cache.check())

    assert of_ann == of_bob == 40 // 2 // len(keys) // 3
