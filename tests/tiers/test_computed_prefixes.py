"""Computed prefixes: how far a prompt agrees with earlier ones of which few blocks were kept."""

from kvtier.tiers.computed_prefixes import ComputedPrefixes
from kvtier.tiers.naming.block_hash import BlockChain, BlockName

BLOCK_SIZE = 4


def names_of(*token_ids: int) -> list[BlockName]:
    chain = BlockChain(BLOCK_SIZE)
    chain.extend(list(token_ids))
    return chain.names


def test_the_longest_prefix_ends_where_two_prompts_part() -> None:
    computed = ComputedPrefixes()
    computed.add(names_of(*range(40)))

    assert computed.longest(names_of(*range(40))) == 10
    assert computed.longest(names_of(*range(25), *range(60, 80))) == 6
    assert computed.longest(names_of(60, *range(1, 40))) == 0
    assert computed.longest([]) == 0


def test_the_oldest_prefixes_are_forgotten_and_the_end_of_a_prompt_shows_what_came_before_it() -> None:
    computed = ComputedPrefixes(5)
    first, second = names_of(*range(16)), names_of(*range(50, 66))
    computed.add(first)
    computed.add(second)

    assert computed.longest(second) == 4
    assert computed.longest(first) == 4
    assert computed.longest(first[:3]) == 0

    computed.add(first[:3])
    assert [computed.longest(first[:3]), computed.longest(first), computed.longest(second)] == [3, 3, 4]
