"""Queries that ask the remote store which blocks of a prompt it has, before the prompt is looked up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from kvtier.tiers.lower.breaker import Attempt
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

ANSWER_S = 0.1  # how long a request waits for an answer
FIRST_NAMES = 64  # names in the first question about a prefix, which is the only one if the store lacks the prefix
MAX_NAMES = 4096  # maximum number of names in one question
GROWTH = 8  # factor by which each further question is longer
NOTHING = bytes(32)  # a name that no block has, to test whether the store answers


class RemoteInquiry:
    """The query of a request to a remote tier. It is done when the answer is known or would come too late."""

    def __init__(self, is_done: bool = False) -> None:
        self.is_done = is_done


@dataclass(eq=False, slots=True)
class Question:
    """A question to the store that is in flight: which of some consecutive blocks of a prefix does it have?"""

    group_id: int
    names: Sequence[BlockName]  # all names still to be asked about; this question is about the first *num_asked*
    num_asked: int
    attempt: Attempt
    asked_at: float
    began_at: float  # when the first question about the prefix was asked
    waiting: list[RemoteInquiry]  # the inquiries that wait for the answer
    is_late: bool = False  # whether the answer is overdue


class Inquiries:
    """The queries that ask the remote store for the parts of prompts that no faster tier has.

    The store is asked about a prefix in parts, until a block is absent. No call blocks. An inquiry is done at once if
    the answers are already known or the store is suspended, otherwise after `ANSWER_S` at the latest. An answer that
    comes later is still recorded for the next requests. Owned by the tiers' thread.
    """

    def __init__(
        self, remote: RemoteTier, forgets: Sequence[bool], transfers: TransferEngine, clock: Callable[[], float]
    ) -> None:
        """Begin without inquiries, and test whether the store answers.

        *forgets* says for each attention group whether its attention reads only recent blocks. In such a group, the
        store may have the later blocks of a prefix without the earlier ones.
        """
        self._remote = remote
        self._forgets = forgets
        self._transfers = transfers
        self._clock = clock
        self._under_way: dict[tuple[int, BlockName], Question] = {}  # by the first name
        self._try_out()

    def begin(self, group_id: int, names: Sequence[BlockName]) -> RemoteInquiry:
        """Ask the store which of the blocks *names* it has.

        *names* are the rest of a prefix, from the first block that no faster tier has.
        """
        presence = self._remote.presence
        names = names[presence.num_held(group_id, names) :]
        inquiry = RemoteInquiry(not names or presence.is_absent(group_id, names[0]))
        if inquiry.is_done:
            return inquiry
        if (question := self._under_way.get((group_id, names[0]))) is not None:
            question.waiting.append(inquiry)
            inquiry.is_done = question.is_late
        else:
            waits = self._remote.asking.is_closed and self._remote.reading.is_closed
            inquiry.is_done = not self._ask(group_id, names, FIRST_NAMES, self._clock(), [inquiry]) or not waits
        return inquiry

    def go_on(self) -> None:
        """End inquiries that have waited for `ANSWER_S`. If the store has failed, test whether it answers again."""
        if (
            self._under_way and not self._transfers.has_undelivered
        ):  # undelivered transfers may include answers, which are then not late
            now = self._clock()
            for question in self._under_way.values():
                if now - question.began_at >= ANSWER_S:
                    self._let_go_on(question)
                if not question.is_late and now - question.asked_at >= ANSWER_S:
                    question.is_late = True
                    self._remote.asking.on_hung(question.attempt)
        if not self._remote.asking.is_closed:
            self._try_out()

    def _try_out(self) -> None:
        """Ask about a block that does not exist, to find out whether the store answers."""
        if (0, NOTHING) not in self._under_way:
            self._ask(0, [BlockName(NOTHING)], 1, self._clock(), [])

    def _ask(
        self, group_id: int, names: Sequence[BlockName], limit: int, began_at: float, waiting: list[RemoteInquiry]
    ) -> bool:
        """Ask about the first *limit* of *names*. Return False if the store is suspended or the queue is full."""
        attempt = self._remote.asking.begin()
        if attempt is None:
            return False
        question = Question(group_id, names, min(limit, len(names)), attempt, self._clock(), began_at, waiting)
        keys = [self._remote.key(group_id, name) for name in names[: question.num_asked]]
        apart = self._forgets[group_id]
        remote = self._remote
        if not self._transfers.watch(
            remote.asks, lambda: remote.ask(keys, apart), lambda transfer: self._on_answered(question, transfer)
        ):
            self._remote.asking.withdraw(attempt)
            return False
        self._under_way[group_id, names[0]] = question
        self._remote.counts["asked"] += bool(waiting)
        return True

    def _on_answered(self, question: Question, transfer: Transfer) -> None:
        del self._under_way[question.group_id, question.names[0]]
        breaker = self._remote.asking
        if isinstance(transfer.error, LaneClosed):
            breaker.withdraw(question.attempt)
        elif transfer.error is not None:
            breaker.on_failed(question.attempt)
        else:
            breaker.on_succeeded(question.attempt)
            self._transfers.speed(Route.REMOTE_TO_HOST).update_latency(transfer.seconds)
            if self._take_in(question, transfer.result):
                return
        _end(question)

    def _take_in(self, question: Question, are_there: list[bool | None]) -> bool:
        """Record an answer, and ask about the remaining names if needed. Return whether a question was asked.

        A block whose presence could not be determined does not count as absent, because a node of a cluster may be
        unavailable for a moment.
        """
        presence, group_id, names = self._remote.presence, question.group_id, question.names
        presence.add(group_id, list(compress(names, are_there)))
        if not all(are_there) and not self._forgets[group_id]:
            first_hole = next(i for i, is_there in enumerate(are_there) if not is_there)
            if are_there[first_hole] is False and names[first_hole] != NOTHING:
                presence.note_absent(group_id, names[first_hole])
            return False
        rest, limit = names[question.num_asked :], min(GROWTH * question.num_asked, MAX_NAMES)
        return bool(rest) and self._ask(group_id, rest, limit, question.began_at, question.waiting)

    def _let_go_on(self, question: Question) -> None:
        self._remote.counts["late"] += sum(not inquiry.is_done for inquiry in question.waiting)
        _end(question)


def _end(question: Question) -> None:
    for inquiry in question.waiting:
        inquiry.is_done = True
