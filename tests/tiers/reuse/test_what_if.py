"""What tiers of other sizes would find: against caches of these sizes, and against real tiers."""

import itertools
from functools import cache

import pytest
from exact_lru import ExactLru, chats, lru_hit_ratio
from simulated_engine import Machine, SimulatedEngine, documents

from kvtier.tiers.lower.statistics import TierStatistics, TokenBalance
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.reuse.what_if import HALF_LIFE_S, SIZES, WhatIf

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
DOCUMENT_TIERS = {Tier.DEVICE: 256, Tier.HOST: 300, Tier.DISK: 400}


def tier(num_blocks: int, block_bytes: int = BLOCK_BYTES, num_dirty: int = 0) -> TierStatistics:
    """A tier that is full."""
    num_bytes = num_blocks * block_bytes
    return TierStatistics(num_blocks, num_bytes, capacity_bytes=num_bytes, num_dirty=num_dirty)


@cache
def answered(device_blocks: int, host_blocks: int, disk_blocks: int) -> SimulatedEngine:
    """Real tiers of these sizes, after questions about documents."""
    machine = Machine(1e5, 30_500.0, 50e9, 50e9, device_blocks, host_blocks, disk_blocks)
    engine = SimulatedEngine(machine, "always")
    engine.answer(documents(500, num_documents=120, num_blocks=24))
    return engine


def host_hits(num_blocks: int) -> TokenBalance:
    return TokenBalance(host=num_blocks * BLOCK_TOKENS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [1500, 6000])
def test_estimates_are_those_of_exact_replay(num_blocks: int, seed: int) -> None:
    prompts = chats(4000, seed)
    lru, what_if = ExactLru(num_blocks), WhatIf(lambda: 0.0)
    for names in prompts:
        num_found = lru.ask(names)
        tokens = host_hits(num_found).plus(TokenBalance(recomputed=(len(names) - num_found) * BLOCK_TOKENS))
        what_if.on_prompt(names, BLOCK_TOKENS, BLOCK_BYTES, tokens)

    found = what_if.hit_ratios({Tier.HOST: tier(num_blocks)})

    what_if.check()
    assert found.keys() == {Tier.HOST}
    exact = {size: lru_hit_ratio(prompts, round(size * num_blocks)) for size in SIZES}
    assert found[Tier.HOST] == pytest.approx(exact, abs=0.02)
    assert exact[4.0] - exact[0.5] > 0.1, "sizes that make no difference show nothing"


@pytest.mark.long
@pytest.mark.parametrize("resized", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_estimates_are_what_real_tiers_of_these_sizes_find(resized: Tier) -> None:
    here = answered(*DOCUMENT_TIERS.values())
    estimated = here.what_if.hit_ratios(here.cache.statistics().tiers)[resized]

    for factor in (0.5, 2.0):
        sizes = {**DOCUMENT_TIERS, resized: round(DOCUMENT_TIERS[resized] * factor)}
        seen = answered(*sizes.values()).tokens
        down_to = itertools.takewhile(lambda each: each.depth <= resized.depth, Tier)
        share = sum(getattr(seen, each) for each in down_to) / seen.num_tokens
        assert estimated[factor] == pytest.approx(share, abs=0.05), factor


def test_at_its_own_size_a_tier_finds_what_it_found() -> None:
    what_if = WhatIf(lambda: 0.0)
    tokens = TokenBalance(device=10, host=30, disk=20, remote=10, recomputed=30)
    what_if.on_prompt(chats(1, 0)[0], BLOCK_TOKENS, BLOCK_BYTES, tokens)

    found = what_if.hit_ratios({each: tier(100) for each in Tier})

    assert {each: ratios[1.0] for each, ratios in found.items()} == {Tier.DEVICE: 0.1, Tier.HOST: 0.4, Tier.DISK: 0.6}


@pytest.mark.parametrize("compression", [1, 2])
def test_a_tier_with_another_share_of_states_is_not_taken_for_a_compressed_one(compression: int) -> None:
    state_bytes, mixed, plain = (
        100 * BLOCK_BYTES,
        WhatIf(lambda: 0.0, state_bytes=100 * BLOCK_BYTES),
        WhatIf(lambda: 0.0),
    )
    for names in chats(1000, 0):
        for what_if in (mixed, plain):
            what_if.on_prompt(names, BLOCK_TOKENS, BLOCK_BYTES, TokenBalance(device=10, disk=20, recomputed=70))
    device_bytes, disk_bytes = 10 * BLOCK_BYTES + 10 * state_bytes, 900 * BLOCK_BYTES + 2 * state_bytes
    on_disk = disk_bytes // compression

    found = mixed.hit_ratios(
        {
            Tier.DEVICE: TierStatistics(20, device_bytes, device_bytes, num_states=10),
            Tier.DISK: TierStatistics(902, on_disk, on_disk, num_states=2),
        }
    )

    assert found == plain.hit_ratios(
        {
            Tier.DEVICE: TierStatistics(device_bytes // BLOCK_BYTES, device_bytes, device_bytes),
            Tier.DISK: TierStatistics(disk_bytes // BLOCK_BYTES, on_disk, on_disk),
        }
    )
    assert found[Tier.DISK][0.5] < found[Tier.DISK][2.0]


def test_before_the_first_prompt_there_are_no_ratios() -> None:
    assert WhatIf(lambda: 0.0).hit_ratios({Tier.HOST: tier(100)}) == {}


def test_blocks_that_were_made_push_others_out_but_are_no_question() -> None:
    names, others = list(dict.fromkeys(itertools.chain(*chats(30, 0)))), chats(90, 1)
    what_if = WhatIf(lambda: 0.0)
    what_if.on_prompt(names, BLOCK_TOKENS, BLOCK_BYTES, host_hits(0).plus(TokenBalance(recomputed=100)))
    for made in others:
        what_if.on_generated(made, BLOCK_BYTES)
    what_if.on_prompt(names, BLOCK_TOKENS, BLOCK_BYTES, TokenBalance(recomputed=100))

    num_between = len(set(itertools.chain(*others)))
    found = what_if.hit_ratios({Tier.HOST: tier(num_between // 3)})[Tier.HOST]

    assert found[1.0] == found[2.0] == 0.0
    assert found[4.0] > 0.0


def test_older_prompts_weigh_less() -> None:
    now = 0.0
    what_if = WhatIf(lambda: now)
    names = chats(1, 0)[0]
    what_if.on_prompt(names, BLOCK_TOKENS, BLOCK_BYTES, TokenBalance(recomputed=100))
    now = HALF_LIFE_S
    what_if.on_prompt(names, BLOCK_TOKENS, BLOCK_BYTES, TokenBalance(host=100))

    found = what_if.hit_ratios({Tier.HOST: tier(100)})

    assert found[Tier.HOST][1.0] == pytest.approx(2 / 3)


def test_blocks_above_that_have_no_copy_below_come_on_top_of_a_tier() -> None:
    prompts = chats(3000, 5)

    def at_twice(num_dirty: int) -> float:
        what_if = WhatIf(lambda: 0.0)
        for names in prompts:
            what_if.on_prompt(names, BLOCK_TOKENS, BLOCK_BYTES, TokenBalance(recomputed=len(names) * BLOCK_TOKENS))
        tiers = {Tier.DEVICE: tier(3000, num_dirty=num_dirty), Tier.HOST: tier(1000)}
        return what_if.hit_ratios(tiers)[Tier.HOST][2.0]

    exact = [lru_hit_ratio(prompts, size) for size in (1000, 2000, 4000, 5000)]
    assert at_twice(0) == pytest.approx(exact[1] - exact[0], abs=0.02)
    assert at_twice(3000) == pytest.approx(exact[3] - exact[2], abs=0.02)


def test_on_disk_compressed_blocks_take_less_room() -> None:
    prompts = chats(3000, 6)
    what_if = WhatIf(lambda: 0.0)
    for names in prompts:
        what_if.on_prompt(names, BLOCK_TOKENS, BLOCK_BYTES, TokenBalance(recomputed=len(names) * BLOCK_TOKENS))
    tiers = {Tier.HOST: tier(500), Tier.DISK: tier(2000, BLOCK_BYTES // 2)}

    found = what_if.hit_ratios(tiers)[Tier.DISK]

    exact = [lru_hit_ratio(prompts, size) for size in (2000, 4000)]
    assert found[2.0] == pytest.approx(exact[1] - exact[0], abs=0.02)
