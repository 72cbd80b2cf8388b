"""Explainer: what it costs the thread that owns it, and what a client learns of another one's prompts."""

import random
import time
from dataclasses import dataclass, field, replace

from kvtier.engine.observability.explain.explainer import Explainer
from kvtier.engine.observability.explain.explanation import Explanation, Why
from kvtier.engine.observability.explain.past_requests import MAX_OF_ID
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.device.ghosts import Ghosts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier

SIZE = 4
NUM_TOKENS = 16 * SIZE


@dataclass
class Bed:
    """An explainer, whose clock tells the time since the Unix epoch, and what its tiers have lost."""

    ghosts: Ghosts = field(default_factory=lambda: Ghosts(256))
    explainer: Explainer = field(default_factory=lambda: Explainer(SIZE, {}, time.time))
    num_ended: int = 0

    def chain(self, token_ids: list[int], salt: str | None = None) -> tuple[BlockChain, Trail]:
        """A prompt of which nothing was found."""
        chain = BlockChain(SIZE, ExtraKeys(cache_salt=salt))
        chain.extend(token_ids)
        misses = ((len(token_ids), Reason.NEVER_SEEN),)
        return chain, Trail(SIZE, chain.names, b"", 0, misses)

    def end(
        self,
        request_id: str,
        token_ids: list[int],
        salt: str | None = None,
        tenant: str | None = None,
        as_of: float = 0.0,
    ) -> None:
        """Have a request end that computed all of its prompt. It was looked up at *as_of* (0: just now)."""
        chain, trail = self.chain(token_ids, salt)
        trail = replace(trail, as_of=as_of)
        balance = TokenBalance(recomputed=len(token_ids), reasons={Reason.NEVER_SEEN: len(token_ids)})
        self.num_ended += 1
        record = RequestRecord(request_id, tenant, None, float(self.num_ended), balance, total_s=0.5)
        self.explainer.on_ended(record, trail, chain, self.ghosts)

    def ask(self, token_ids: list[int], salt: str | None = None, *same_messages: str) -> Explanation:
        """What is said of a prompt that is only asked about."""
        chain, trail = self.chain(token_ids, salt)
        return self.explainer.evidence_now(
            trail, chain, self.ghosts, [None] * 16, len(token_ids), None, same_messages=same_messages
        ).explanation()


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(NUM_TOKENS)]


def test_a_question_for_an_id_that_all_requests_have_is_about_the_newest_alone() -> None:
    bed = Bed()
    for number in range(MAX_OF_ID + 30):
        bed.end("same", prompt_of(number))

    found = bed.explainer.find("same", None)

    assert [past.record.arrived_at for past in found] == [float(number) for number in range(31, MAX_OF_ID + 31)]


def test_another_tenants_requests_of_an_id_push_nobodys_out() -> None:
    bed = Bed()
    bed.end("same", prompt_of(0), tenant="ann")
    for number in range(MAX_OF_ID + 1):
        bed.end("same", prompt_of(number), tenant="eve")

    assert len(bed.explainer.find("same", "ann")) == 1


def test_evidence_is_a_snapshot_that_another_thread_may_look_at_later() -> None:
    bed = Bed()
    bed.end("first", prompt_of(1))
    bed.end("second", [*prompt_of(1)[:3], *prompt_of(2)])
    (past,) = bed.explainer.find("second", None)
    evidence = bed.explainer.evidence(past)
    before = evidence.explanation()

    bed.end("third", [*prompt_of(1)[:3], *prompt_of(2)])
    bed.ghosts.remember(past.trail.names, Tier.HOST, EvictionCause.ROOM, 1.0)
    later = bed.explainer.evidence(past)

    assert evidence.explanation() == before
    assert before.rows[0].why is Reason.NEVER_SEEN
    assert before.departure is not None
    assert before.departure.num_shared == 3
    assert later.explanation().rows[0].why is Reason.EVICTED_FROM_HOST


def test_tokens_that_several_requests_compute_at_the_same_time_were_not_seen_before_by_any_of_them() -> None:
    bed = Bed()
    looked_up_at = time.time()
    for request_id in ("first", "second", "third"):
        bed.end(request_id, prompt_of(1), as_of=looked_up_at)

    for request_id in ("first", "second", "third"):
        (past,) = bed.explainer.find(request_id, None)
        explanation = bed.explainer.evidence(past).explanation()
        assert [row.why for row in explanation.rows] == [Reason.NEVER_SEEN]
        assert explanation.departure is None


def test_a_prompt_that_ended_before_the_lookup_and_whose_eviction_is_forgotten_was_seen_long_ago() -> None:
    bed = Bed()
    bed.end("first", prompt_of(1), as_of=time.time())
    bed.end("second", prompt_of(1), as_of=time.time())

    (past,) = bed.explainer.find("second", None)
    assert {row.why for row in bed.explainer.evidence(past).explanation().rows} == {Why.FORGOTTEN}


def test_a_guess_under_another_salt_looks_the_same_whether_it_is_right_or_wrong() -> None:
    bed = Bed()
    bed.end("victims", prompt_of(1), salt="the victim's")
    right, wrong = prompt_of(1), [*prompt_of(1)[:5], 7, *prompt_of(1)[6:]]

    for salt in (None, "a guess"):
        assert bed.ask(right, salt) == bed.ask(wrong, salt)
        assert bed.ask(right, salt, "victims") == bed.ask(right, salt)  # the same messages, another text
        assert bed.ask(wrong, salt, "victims") == bed.ask(right, salt)


def test_a_prompt_that_was_seen_without_a_salt_is_named_to_who_has_one() -> None:
    bed = Bed()
    bed.end("open", prompt_of(1))

    row = bed.ask(prompt_of(1), "mine").rows[0]

    assert (row.why, row.differs) == (Why.OTHER, ("cache_salt",))


def test_requests_that_ran_when_blocks_were_evicted_are_named_and_without_any_the_last_before() -> None:
    bed = Bed()
    for number in range(1, 7):
        bed.end(f"request {number}", prompt_of(number))
    bed.end("asked", prompt_of(9))
    (past,) = bed.explainer.find("asked", None)
    for block, at in ((0, 3.25), (1, 4.75), (2, 6.25)):  # during the third and the sixth; after the fourth
        bed.ghosts.remember([past.trail.names[block]], Tier.HOST, EvictionCause.ROOM, at)

    found = bed.explainer.evidence(past).explanation()

    assert set(found.rows[0].during) == {"request 3", "request 4", "request 6"}


def test_requests_of_other_tenants_are_not_named_with_an_eviction() -> None:
    bed = Bed()
    bed.end("anns", prompt_of(1), tenant="ann")
    bed.end("eves", prompt_of(2), tenant="eve")
    bed.end("asked", prompt_of(9), tenant="ann")
    (past,) = bed.explainer.find("asked", "ann")
    bed.ghosts.remember([past.trail.names[0]], Tier.HOST, EvictionCause.ROOM, 2.25)  # while eve's request ran

    found = bed.explainer.evidence(past).explanation()

    assert found.rows[0].why is Reason.EVICTED_FROM_HOST
    assert found.rows[0].during == ("anns",)


def test_the_same_messages_under_another_salt_say_nothing_of_a_template() -> None:
    bed = Bed()
    bed.end("theirs", prompt_of(1), "theirs")
    bed.end("mine", prompt_of(2), "mine")

    assert bed.ask(prompt_of(9), "mine", "mine").rows[0].why is Why.OTHER_TEMPLATE
    assert bed.ask(prompt_of(9), "mine", "theirs").rows[0].why is Reason.NEVER_SEEN
