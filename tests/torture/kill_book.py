"""Which blocks a store killed under load must still have, by its child's lines: calls begun and done, evictions."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torture_blocks import KINDS, max_charged, min_charged, parent_of


@dataclass
class Call:
    """A call of the child, from its begin to its end: infinity if it was under way at the kill."""

    act: str
    numbers: list[int]
    begin: float
    end: float = math.inf
    evicted: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.end < math.inf


@dataclass
class History:
    """The calls that put and removed a block, as intervals: calls of several threads overlap in an unknown order."""

    puts: list[tuple[float, float]] = field(default_factory=list)
    gone: list[tuple[float, float]] = field(default_factory=list)

    def must_be_there(self) -> bool:
        """Whether a finished put began after the end of every call that removed the block, or may have."""
        last_gone = max((end for _, end in self.gone), default=-math.inf)
        return any(begin > last_gone for begin, end in self.puts if end < math.inf)

    def must_be_gone(self) -> bool:
        last_put = max((end for _, end in self.puts), default=-math.inf)
        return any(begin > last_put for begin, end in self.gone if end < math.inf)


class Book:
    """The history of all blocks put into one folder, over all kills."""

    def __init__(self) -> None:
        self._histories: dict[int, History] = {}

    def put(self, numbers: list[int], evicted: list[int], now: float) -> None:
        """Note a call that was finished."""
        self._enter(Call("put", numbers, now, now, evicted))

    def judge(self, lines: Iterable[dict[str, Any]], found: list[int], now: float) -> int:
        """Compare what a child said until it was killed with what was *found* at *now*; how many calls were under way.

        AssertionError says what is lost, what came back from the dead, or which block left before its continuation.
        """
        calls = _calls(lines)
        for call in calls:
            self._enter(call)
        open_calls = [call for call in calls if not call.is_done]
        there = set(found)
        assert len(there) == len(found), "a key stands twice"

        lost = [number for number, history in self._histories.items() if history.must_be_there()]
        lost = [number for number in lost if number not in there]
        room = self._room_for(open_calls, calls, there)
        charges = sorted(map(min_charged, lost))[:-1]  # the last one evicted may be larger than was needed
        assert (sum(charges) <= room) if room else lost == [], f"lost, with room made for {room} bytes: {lost}"
        self._assert_tails_left_first(calls, there)
        risen = [number for number in there if self._histories[number].must_be_gone()]
        assert risen == [], f"came back after they were deleted or evicted: {risen}"
        for call in open_calls:
            own = [(number, number in there) for number in call.numbers if self._is_of_one_call(number)]
            assert call.act != "put" or len({present for _, present in own}) < 2, f"half of a call is there: {own}"

        for number, history in self._histories.items():
            history.puts = [(now, now)] if number in there else []
            history.gone = [] if number in there else [(now, now)]
        return len(open_calls)

    def _room_for(self, open_calls: list[Call], calls: list[Call], there: set[int]) -> int:
        """Bytes for which blocks may have been evicted untold: of puts under way, and of those committed with them."""
        puts = [call for call in open_calls if call.act == "put" and self._may_have_happened(call, there)]
        since = min((call.begin for call in puts), default=math.inf)
        puts += [call for call in calls if call.act == "put" and call.is_done and call.end >= since]
        return sum(max_charged(number) for call in puts for number in call.numbers)

    def _may_have_happened(self, call: Call, there: set[int]) -> bool:
        own = [number for number in call.numbers if self._is_of_one_call(number)]
        return not own or any(number in there for number in own)

    def _is_of_one_call(self, number: int) -> bool:
        """Whether no other call can have put or removed the block."""
        history = self._histories[number]
        return len(history.puts) == 1 and not history.gone

    def _enter(self, call: Call) -> None:
        interval = (call.begin, call.end)
        for number in call.numbers:
            history = self._histories.setdefault(number, History())
            if call.act == "put":
                history.puts.append(interval)
            elif call.act == "delete":
                history.gone.append(interval)
        for number in call.evicted:
            self._histories[number].gone.append(interval)

    def _assert_tails_left_first(self, calls: list[Call], there: set[int]) -> None:
        """No record left for room before one that continues it, which was put before and is *there* still."""
        for call in calls:
            for parent in call.evicted:
                child = parent + len(KINDS)
                if child not in there or parent_of(child) != parent:
                    continue
                history = self._histories[child]
                is_old = not history.gone and all(end < call.begin for _, end in history.puts)
                assert not is_old, f"block {parent} was evicted before {child}, which continues it"


def _calls(lines: Iterable[dict[str, Any]]) -> list[Call]:
    calls: dict[int, Call] = {}
    for line in lines:
        if "call" in line:
            calls[line["call"]] = Call(line["act"], line["numbers"], line["begin"])
        elif "done" in line:
            call = calls[line["done"]]
            call.end, call.evicted = line["end"], line["evicted"]
            if "full" in line:  # OSError: the put did not happen
                call.act, call.numbers = "nothing", []
    return list(calls.values())
