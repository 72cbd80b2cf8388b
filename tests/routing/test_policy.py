"""The policy: prefix against load, sessions, hashing; no table below needs a server."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.routing.config import PolicyConfig
from kvtier.routing.policy import Candidate, Load, Reason, RoutingPolicy
from kvtier.routing.prefix_index import Matched

POLICY = RoutingPolicy(PolicyConfig())
IDLE, BUSY = Load(), Load(num_requests=4, num_waiting_tokens=20_000)


def chosen(num_tokens: int, *candidates: Candidate, session: str | None = None) -> tuple[str, Reason]:
    choice = POLICY.choose(num_tokens, candidates, session)
    assert choice is not None
    return choice.name, choice.reason


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([Candidate("a"), Candidate("b", Matched(device=4096))], ("b", Reason.PREFIX)),
        ([Candidate("a", Matched(device=512)), Candidate("b", Matched(device=4096))], ("b", Reason.PREFIX)),
        ([Candidate("a", Matched(disk=4096)), Candidate("b", Matched(host=4096))], ("b", Reason.PREFIX)),
        ([Candidate("a", Matched(host=4096)), Candidate("b", Matched(device=4096))], ("b", Reason.PREFIX)),
        ([Candidate("a", Matched(device=2048)), Candidate("b", Matched(disk=4096))], ("b", Reason.PREFIX)),
        ([Candidate("a"), Candidate("b", Matched(expected=4096))], ("b", Reason.PREFIX)),
        ([Candidate("a", Matched(device=512), BUSY), Candidate("b")], ("b", Reason.LOAD)),
        ([Candidate("a", Matched(device=4096), BUSY), Candidate("b", Matched(device=4096))], ("b", Reason.PREFIX)),
        ([Candidate("a", Matched(device=512)), Candidate("b", Matched(device=512))], ("a", Reason.PREFIX)),
        ([Candidate("a"), Candidate("b")], ("a", Reason.HASH)),
        ([Candidate("a", load=BUSY), Candidate("b")], ("b", Reason.HASH)),
        ([Candidate("a", is_open=False), Candidate("b")], ("b", Reason.HASH)),
        ([Candidate("a", Matched(device=8000), is_open=False), Candidate("b")], ("b", Reason.HASH)),
    ],
)
def test_the_choice_of_a_prompt_of_8000_tokens(candidates: list[Candidate], expected: tuple[str, Reason]) -> None:
    assert chosen(8000, *candidates) == expected


def test_a_conversation_stays_where_it_was_although_another_is_a_little_better() -> None:
    candidates = [Candidate("a", Matched(device=512)), Candidate("b")]

    assert chosen(2000, *candidates, session="b") == ("b", Reason.SESSION)


def test_a_conversation_leaves_a_replica_that_has_much_to_do() -> None:
    assert chosen(2000, Candidate("a"), Candidate("b", load=BUSY), session="b") == ("a", Reason.HASH)


def test_a_conversation_leaves_a_replica_that_is_closed_and_one_that_is_gone() -> None:
    candidates = [Candidate("a"), Candidate("b", is_open=False)]

    assert chosen(2000, *candidates, session="b") == ("a", Reason.HASH)
    assert chosen(2000, *candidates, session="gone") == ("a", Reason.HASH)


def test_nobody_is_chosen_if_nobody_is_open() -> None:
    assert POLICY.choose(100, [Candidate("a", is_open=False)]) is None
    assert POLICY.choose(100, []) is None


def test_hashing_gives_no_replica_much_more_than_its_share_of_requests() -> None:
    """All prompts have the same first blocks, so the same order: the first takes what it may, then the others."""
    num_requests = dict.fromkeys("abcd", 0)
    for _ in range(400):
        candidates = [Candidate(name, load=Load(number)) for name, number in num_requests.items()]
        num_requests[chosen(100, *candidates)[0]] += 1

    assert num_requests["a"] == max(num_requests.values()) <= 1.25 * 400 / 4 + 1


MATCHED = st.builds(Matched, *[st.integers(0, 4000)] * 4)
LOADS = st.builds(Load, st.integers(0, 100), st.integers(0, 100_000))
CANDIDATES = st.lists(
    st.tuples(MATCHED, LOADS, st.booleans()).map(lambda each: Candidate("", *each)), min_size=1, max_size=6
).map(lambda found: [Candidate(f"r{i}", each.matched, each.load, each.is_open) for i, each in enumerate(found)])
LENGTHS = st.integers(1, 50_000)
SESSIONS = st.sampled_from([None, "r0", "r1", "elsewhere"])


@given(LENGTHS, CANDIDATES, SESSIONS)
def test_only_open_replicas_are_chosen_and_one_if_there_is_one(
    num_tokens: int, candidates: list[Candidate], session: str | None
) -> None:
    choice = POLICY.choose(num_tokens, candidates, session)

    open_ones = {each.name for each in candidates if each.is_open}
    assert (choice is None) is (not open_ones)
    assert choice is None or choice.name in open_ones


@given(LENGTHS, CANDIDATES, SESSIONS)
def test_the_same_question_has_the_same_answer(
    num_tokens: int, candidates: list[Candidate], session: str | None
) -> None:
    first, second = (RoutingPolicy(PolicyConfig()).choose(num_tokens, candidates, session) for _ in range(2))

    assert first == second


@given(st.integers(10_000, 50_000), st.integers(1, 4000), st.integers(1, 4000), LOADS)
def test_more_prefix_wins_at_equal_load(num_tokens: int, less: int, more: int, load: Load) -> None:
    candidates = [Candidate("less", Matched(device=less), load), Candidate("more", Matched(device=less + more), load)]

    assert chosen(num_tokens, *candidates)[0] == "more"


@given(LENGTHS, MATCHED, LOADS, st.integers(1, 100), st.integers(0, 10_000))
def test_less_load_wins_at_equal_prefix(
    num_tokens: int, matched: Matched, load: Load, requests: int, tokens: int
) -> None:
    more = Load(load.num_requests + requests, load.num_waiting_tokens + tokens)

    assert chosen(num_tokens, Candidate("busier", matched, more), Candidate("idler", matched, load))[0] in (
        ("idler",) if matched.total else ("idler", "busier")
    )
