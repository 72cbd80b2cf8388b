"""Prefixes that are kept until they have not been read for a while: for how long, and what of a share they take."""

from collections.abc import Iterator

import pytest
from document_tables import BLOCK_BYTES, BLOCK_SIZE, tables
from small_models import byte_tokenizer
from transformers import PreTrainedModel

from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.server.documents.kept_prefixes import Breakpoint, Keeping, MarkedPrompt, PinnedPrefixes
from kvtier.server.documents.pin_shares import PinShares

MINUTES, HOUR = 300.0, 3600.0


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def core(model: PreTrainedModel, clock: FakeClock) -> Iterator[EngineCore]:
    """An engine with room for pins of eight blocks."""
    with build_core(model, byte_tokenizer(), as_config(tables(num_host_slots=16))) as core:
        core.pins = TimedPins(core.cache, clock)
        yield core
        core.cache.check()


@pytest.fixture
def prefixes(core: EngineCore) -> PinnedPrefixes:
    return PinnedPrefixes(core, PinShares(core, 1))


def held_blocks(core: EngineCore) -> int:
    return (core.cache.pins.max_bytes - core.cache.pins.free_bytes) // BLOCK_BYTES


def keep(prefixes: PinnedPrefixes, prompt: str, *ends: tuple[int, float]) -> list[int]:
    """The blocks up to which a prompt, of a block for each letter, is kept; *ends* are in blocks, with their ttl."""
    return [each.num_tokens // BLOCK_SIZE for each in prefixes.keep(marked(prompt, *ends)).breakpoints]


def marked(prompt: str, *ends: tuple[int, float], tenant: str | None = None) -> MarkedPrompt:
    token_ids = [ord(letter) for letter in prompt for _ in range(BLOCK_SIZE)]
    breakpoints = [Breakpoint(num_blocks * BLOCK_SIZE, ttl_s) for num_blocks, ttl_s in ends]
    return MarkedPrompt(tenant, token_ids, None, None, breakpoints)


def held_at(core: EngineCore, clock: FakeClock, now: float) -> int:
    clock.now = now
    core.idle()
    return held_blocks(core)


def test_a_prefix_ends_when_it_has_not_been_read_for_its_time(
    core: EngineCore, prefixes: PinnedPrefixes, clock: FakeClock
) -> None:
    assert keep(prefixes, "aaa", (3, MINUTES)) == [3]
    clock.now = 200.0
    assert keep(prefixes, "aaab", (3, MINUTES)) == [3]

    assert [held_at(core, clock, now) for now in (300.0, 499.0, 500.0)] == [3, 3, 0]


def test_only_who_reads_all_of_a_prefix_makes_it_last(
    core: EngineCore, prefixes: PinnedPrefixes, clock: FakeClock
) -> None:
    keep(prefixes, "aabb", (4, MINUTES))
    clock.now = 200.0
    keep(prefixes, "aac", (2, MINUTES))

    assert [held_at(core, clock, now) for now in (299.0, 300.0, 500.0)] == [4 + 2, 2, 0]


def test_what_prefixes_have_in_common_counts_once(core: EngineCore, prefixes: PinnedPrefixes) -> None:
    assert keep(prefixes, "aab", (2, HOUR), (3, MINUTES)) == [2, 3]
    assert keep(prefixes, "aabbb", (2, HOUR), (5, MINUTES)) == [2, 5]
    assert keep(prefixes, "aac", (2, HOUR), (3, MINUTES)) == [2, 3]

    assert held_blocks(core) == 2 + 3 + 1


def test_a_prefix_lasts_as_long_as_what_continues_it(
    core: EngineCore, prefixes: PinnedPrefixes, clock: FakeClock
) -> None:
    keep(prefixes, "aa", (2, MINUTES))
    keep(prefixes, "aabb", (4, HOUR))

    assert [held_at(core, clock, now) for now in (301.0, 3599.0, 3600.0)] == [4, 4, 0]


def test_a_breakpoint_inside_a_kept_prefix_takes_nothing_but_may_make_it_last(
    core: EngineCore, prefixes: PinnedPrefixes, clock: FakeClock
) -> None:
    keep(prefixes, "aabb", (4, MINUTES))
    assert keep(prefixes, "aabb", (2, HOUR)) == [2]

    assert [held_at(core, clock, now) for now in (0.0, 301.0, 3600.0)] == [4, 4, 0]


def test_of_two_that_overlap_both_last_when_the_longer_is_read(
    core: EngineCore, prefixes: PinnedPrefixes, clock: FakeClock
) -> None:
    keep(prefixes, "aab", (3, MINUTES))
    keep(prefixes, "aac", (2, MINUTES))
    clock.now = 200.0
    keep(prefixes, "aabd", (4, MINUTES))

    assert [held_at(core, clock, now) for now in (300.0, 500.0)] == [3 + 2 + 1, 0]


def test_what_has_no_room_is_not_kept_and_what_comes_before_it_is(core: EngineCore, prefixes: PinnedPrefixes) -> None:
    assert keep(prefixes, "aaabbbbbbbb", (3, MINUTES), (11, MINUTES)) == [3]
    assert keep(prefixes, "cccccc", (6, MINUTES)) == []

    assert held_blocks(core) == 3


def test_only_whole_blocks_are_kept(core: EngineCore, prefixes: PinnedPrefixes) -> None:
    asked = [Breakpoint(BLOCK_SIZE - 1, HOUR), Breakpoint(2 * BLOCK_SIZE + 5, MINUTES)]

    kept = prefixes.keep(MarkedPrompt(None, [7] * (3 * BLOCK_SIZE), None, None, asked))

    assert kept.breakpoints == [Breakpoint(2 * BLOCK_SIZE, MINUTES)]


def test_each_tenant_keeps_its_own(core: EngineCore, clock: FakeClock) -> None:
    prefixes = PinnedPrefixes(core, PinShares(core, 2))
    prompts = [marked("aaa", (3, MINUTES), tenant=tenant) for tenant in ("ann", "bob")]

    assert [prefixes.keep(prompt).breakpoints for prompt in prompts] == [prompts[0].breakpoints] * 2

    assert (core.pins.num_bytes("ann"), core.pins.num_bytes("bob")) == (3 * BLOCK_BYTES, 3 * BLOCK_BYTES)


def test_who_only_reads_keeps_no_more_and_makes_what_there_is_last(
    core: EngineCore, prefixes: PinnedPrefixes, clock: FakeClock
) -> None:
    prompt = marked("aab", (2, MINUTES), (3, MINUTES))
    assert prefixes.read(prompt) == Keeping(0, [])
    keep(prefixes, "aa", (2, MINUTES))
    clock.now = 200.0

    assert prefixes.read(prompt) == Keeping(2 * BLOCK_SIZE, prompt.breakpoints[:1])

    assert [held_at(core, clock, now) for now in (300.0, 500.0)] == [2, 0]


def test_what_was_kept_before_is_told_with_what_is_kept_now(prefixes: PinnedPrefixes) -> None:
    keep(prefixes, "aa", (2, MINUTES))
    longer = marked("aabb", (4, MINUTES))

    assert prefixes.keep(longer) == Keeping(2 * BLOCK_SIZE, longer.breakpoints)
    assert prefixes.keep(longer) == Keeping(4 * BLOCK_SIZE, longer.breakpoints)


def test_after_a_reset_a_prefix_is_kept_anew(core: EngineCore, prefixes: PinnedPrefixes) -> None:
    keep(prefixes, "aab", (2, HOUR), (3, MINUTES))
    assert core.reset()
    assert held_blocks(core) == 0

    assert keep(prefixes, "aab", (2, HOUR), (3, MINUTES)) == [2, 3]
    assert held_blocks(core) == 3


def test_what_is_left_of_a_prefix_whose_beginning_has_ended_is_kept_anew(
    core: EngineCore, prefixes: PinnedPrefixes, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few pins end in one step that a prompt may come between the ends of two."""
    keep(prefixes, "aabbcc", (2, MINUTES), (4, MINUTES), (6, MINUTES))
    monkeypatch.setattr("kvtier.engine.scheduling.timed_pins.MAX_ENDED", 1)
    assert 0 < held_at(core, clock, 300.0) < 6

    assert keep(prefixes, "aabbcc", (6, MINUTES)) == [6]

    assert [held_at(core, clock, now) for now in (300.0, 599.0, 600.0)] == [6, 6, 0]
