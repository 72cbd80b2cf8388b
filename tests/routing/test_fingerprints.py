"""Fingerprints: equal for equal prefixes only, however they were come by."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.routing.fingerprints import Fingerprints

FINGERPRINTS = Fingerprints(key=7)
ROOT = FINGERPRINTS.root(None, None)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def chain(tokens: list[int], size: int, before: int = ROOT, of: Fingerprints = FINGERPRINTS) -> list[int]:
    return of.chain(before, np.array(tokens, dtype=np.uint32), size)


@given(TOKENS, st.integers(1, 12), st.integers(1, 8))
def test_a_prefix_has_the_same_one_in_blocks_of_any_size(tokens: list[int], size: int, times: int) -> None:
    assert chain(tokens, size)[times - 1 :: times] == chain(tokens, size * times)


@given(TOKENS, TOKENS, st.integers(1, 12))
def test_a_chain_can_be_gone_on_with(head: list[int], tail: list[int], size: int) -> None:
    head = head[: len(head) // size * size]
    known = chain(head, size)

    assert chain(head + tail, size) == known + chain(tail, size, known[-1] if known else ROOT)


@given(TOKENS, TOKENS)
def test_other_prefixes_have_others(one: list[int], other: list[int]) -> None:
    ends = range(1, 1 + min(len(one), len(other)))
    equal = [one[:end] == other[:end] for end in ends]

    assert [a == b for a, b in zip(chain(one, 1), chain(other, 1), strict=False)] == equal


def test_roots_keep_apart_what_is_not_shared() -> None:
    roots = [
        FINGERPRINTS.root(*what) for what in [(None, None), ("a", None), (None, "a"), ("a", "a"), ("aa", ""), ("", "")]
    ]

    assert len(set(roots)) == len(roots)


def test_a_router_with_another_key_has_others() -> None:
    tokens = [*range(64)]
    other = Fingerprints(key=8)

    assert not set(chain(tokens, 16)) & set(chain(tokens, 16, other.root(None, None), other))
    assert Fingerprints().root(None) != Fingerprints().root(None)
