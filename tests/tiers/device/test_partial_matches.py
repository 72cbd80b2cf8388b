"""PartialMatches: the block that shares most of a prompt's next tokens, against a search one by one."""

import hashlib
import random
from dataclasses import dataclass

import numpy as np

from kvtier.tiers.device.partial_matches import PartialMatches


def key_of(prefix: str) -> bytes:
    return hashlib.sha256(prefix.encode()).digest()


@dataclass(frozen=True)
class OneBlock:
    """A chain of one named block, with a key of the test's choice."""

    key: bytes
    token_ids: list[int]

    def continued_keys(self, start: int, end: int) -> list[bytes]:
        return [self.key]

    def named_ids(self, start: int, end: int) -> np.ndarray:
        return np.array(self.token_ids, np.uint32)


def record(partial_matches: PartialMatches, slot: int, key: bytes, token_ids: list[int]) -> None:
    partial_matches.record(np.array([slot], np.int32), OneBlock(key, token_ids), 0)  # type: ignore[arg-type]  # as much as it reads


class AllNamed:
    """A pool in which every slot holds a named block."""

    def are_named(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), bool)


def sharing(partial_matches: PartialMatches, key: bytes, token_ids: list[int]) -> list[tuple[int, int]]:
    return partial_matches.sharing(key, token_ids, AllNamed())  # type: ignore[arg-type]  # as much as it asks


def test_the_sibling_that_shares_most_comes_first() -> None:
    partial_matches = PartialMatches(8, 4)
    record(partial_matches, 3, key_of("p"), [1, 2, 9, 9])
    record(partial_matches, 5, key_of("p"), [1, 2, 3, 9])
    record(partial_matches, 6, key_of("p"), [7, 2, 3, 4])  # equal later, not at the start
    record(partial_matches, 7, key_of("q"), [1, 2, 3, 4])  # after another prefix

    assert sharing(partial_matches, key_of("p"), [1, 2, 3]) == [(5, 3), (3, 2)]


def test_a_block_of_its_own_tokens_is_its_best_sibling() -> None:
    partial_matches = PartialMatches(2, 4)
    record(partial_matches, 1, key_of("p"), [1, 2, 3, 4])

    assert sharing(partial_matches, key_of("p"), [1, 2, 3, 4]) == [(1, 4)]
    assert sharing(partial_matches, key_of("p"), [1]) == [(1, 1)]


def test_keys_that_agree_in_their_first_eight_bytes_are_not_siblings() -> None:
    partial_matches = PartialMatches(2, 2)
    key = key_of("p")
    record(partial_matches, 0, key, [1, 2])

    assert sharing(partial_matches, key[:31] + bytes([key[31] ^ 1]), [1, 2]) == []


def test_a_forgotten_block_is_nobodys_sibling() -> None:
    partial_matches = PartialMatches(2, 2)
    record(partial_matches, 0, key_of("p"), [1, 2])

    partial_matches.forget(np.array([0], np.int32))

    assert sharing(partial_matches, key_of("p"), [1, 2]) == []


def test_a_tail_shares_no_more_than_the_tokens_that_were_computed() -> None:
    partial_matches = PartialMatches(2, 4)
    record(partial_matches, 1, key_of("q"), [5, 6, 0, 0])
    partial_matches.record_tail(1, key_of("p"), [5, 6])

    assert sharing(partial_matches, key_of("p"), [5, 6, 0, 0]) == [(1, 2)]
    assert sharing(partial_matches, key_of("q"), [5, 6, 0, 0]) == []


def test_many_siblings_agree_with_a_search_one_by_one() -> None:
    pick = random.Random(3)
    partial_matches, known = PartialMatches(400, 6), {}
    for slot in range(400):
        key, token_ids = key_of(pick.choice("abc")), [pick.randrange(3) for _ in range(6)]
        record(partial_matches, slot, key, token_ids)
        known[slot] = key, token_ids
    for _ in range(200):
        key, wanted = key_of(pick.choice("abcd")), [pick.randrange(3) for _ in range(pick.randrange(1, 7))]

        found = sharing(partial_matches, key, wanted)

        shared = {}
        for slot, (its_key, token_ids) in known.items():
            common = next((i for i, (a, b) in enumerate(zip(token_ids, wanted, strict=False)) if a != b), len(wanted))
            if its_key == key and common:
                shared[slot] = common
        assert [count for _, count in found] == sorted(shared.values(), reverse=True)[:8]
        assert all(shared[slot] == count for slot, count in found)


def test_slots_that_change_their_block_between_two_searches_have_the_last_one() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    pick = random.Random(seed)
    partial_matches, known = PartialMatches(10, 2), dict[int, tuple[bytes, list[int]]]()
    for _ in range(300):
        for _ in range(pick.randrange(8)):
            slot = pick.randrange(10)
            if pick.random() < 0.3:
                partial_matches.forget(np.array([slot], np.int32))
                known.pop(slot, None)
            else:
                known[slot] = key_of(pick.choice("ab")), [pick.randrange(3), 1]
                record(partial_matches, slot, *known[slot])

        found = sharing(partial_matches, key_of("a"), [2, 1])

        best = {slot for slot, (key, ids) in known.items() if key == key_of("a") and ids == [2, 1]}
        assert {slot for slot, count in found if count == 2} <= best
        assert len(best) <= 8 or len(found) == 8
        assert len(best) > 8 or {slot for slot, count in found if count == 2} == best
