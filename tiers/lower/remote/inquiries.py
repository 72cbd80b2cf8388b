"""Inquiries: what is asked of a remote tier before it is known where a prompt's blocks are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from kvtier.tiers.lower.breaker import Attempt
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

ANSWER_S = 0.1  # for which a request waits for an answer
FIRST_NAMES = 64  # asked about at first: of a prompt that was never seen it is one question of a few kilobytes
MAX_NAMES = 4096  # in one question
GROWTH = 8  # of each further one
NOTHING = bytes(32)  # a block that nobody has: whether the store answers is asked with it


class RemoteInquiry:
    """What one request asks of a remote tier. It is done when the answer is known, or comes too late."""

    def __init__(self, is_done: bool = False) -> None:
        self.is_done = is_done


@dataclass(eq=False, slots=True)
class Question:
    """Names of one prefix that are being asked about."""

    group_id: int
    names: Sequence[BlockName]  # all that have to be asked about, the first of them in this question
    num_asked: int
    attempt: Attempt
    asked_at: float
    began_at: float  # the first question about the prefix
    waiting: list[RemoteInquiry]
    is_late: bool = False


class Inquiries:
    """Asks where prefixes go on that nothing nearer has, a part at a time, until a block is not there.

    Nothing waits here: an inquiry is done at once where the answers are known already, or the store is left alone, and
    at the latest when `ANSWER_S` have gone by. An answer that comes later is taken in all the same, for those that ask
    next. Owned by the tiers' thread.
    """

    def __init__(
        self, remote: RemoteTier, forgets: Sequence[bool], transfers: TransferEngine, clock: Callable[[], float]
    ) -> None:
        """*forgets*: by group, whether its prefixes have holes: it needs its last blocks only."""
        self._remote = remote
        self._forgets = forgets
        self._transfers = transfers
        self._clock = clock
        self._under_way: dict[tuple[int, BlockName], Question] = {}  # by the first name
        self._try_out()

    def begin(self, group_id: int, names: Sequence[BlockName]) -> RemoteInquiry:
        """Ask about *names*, a prefix's blocks from the first on that nothing nearer has."""
        presence = self._remote.presence
        names = names[presence.num_held(group_id, names) :]
        inquiry = RemoteInquiry(not names or presence.is_absent(group_id, names[0]))
        if inquiry.is_done:
            return inquiry
        if (question := self._under_way.get((group_id, names[0]))) is not None:
            question.waiting.append(inquiry)
            inquiry.is_done = question.is_late
        else:
            waits = self._remote.asking.is_closed and self._remote.is_readable
            inquiry.is_done = not self._ask(group_id, names, FIRST_NAMES, self._clock(), [inquiry]) or not waits
        return inquiry

    def go_on(self) -> None:
        """Let those go on without an answer that have waited long enough, and try a store that failed."""
        if self._under_way and not self._transfers.has_finished:  # else its owner was away, and the answer is there
            now = self._clock()
            for question in self._under_way.values():
                if now - question.began_at >= ANSWER_S:
                    self._let_go_on(question)
                if not question.is_late and now - question.asked_at >= ANSWER_S:
                    question.is_late = True
                    self._remote.asking.on_hung(question.attempt)
        if not self._remote.asking.is_closed:
            self._try_out()

    @property
    def num_under_way(self) -> int:
        """Questions that have not been answered."""
        return len(self._under_way)

    def _try_out(self) -> None:
        """Ask about a block that nobody has: whether the store answers."""
        if (0, NOTHING) not in self._under_way:
            self._ask(0, [BlockName(NOTHING)], 1, self._clock(), [])

    def _ask(
        self, group_id: int, names: Sequence[BlockName], limit: int, began_at: float, waiting: list[RemoteInquiry]
    ) -> bool:
        """Ask about the first of *names*; False if the store is to be left alone, or the lane is full."""
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
            self._transfers.speed(Route.REMOTE_TO_HOST).learn_latency(transfer.seconds)
            if self._take_in(question, transfer.result):
                return
        _end(question)

    def _take_in(self, question: Question, are_there: list[bool | None]) -> bool:
        """Take an answer in; whether the rest of the names are asked about now.

        What could not be asked is not taken for absent: a node of a cluster may be away for a moment.
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
        """Let those go on that wait for this answer."""
        self._remote.counts["late"] += sum(not inquiry.is_done for inquiry in question.waiting)
        _end(question)


def _end(question: Question) -> None:
    for inquiry in question.waiting:
        inquiry.is_done = True
