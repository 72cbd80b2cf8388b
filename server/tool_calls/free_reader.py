"""FreeReader: reads an answer whose model was free to call tools or not; what is no call stays text."""

from collections.abc import Collection

from kvtier.engine.text.detokenizer import num_begun
from kvtier.server.tool_calls.call_syntax import Block, BlockReader, CallSyntax, NotACall
from kvtier.server.tool_calls.deltas import ArgumentsDelta, CallBegin, Delta, TextDelta


class FreeReader:
    """A `Reader`. A call is told when all of it is there and is one, since what was told cannot be taken back.

    White space before a call is left out, and so is what comes between calls. Invariant: what is held back is white
    space, then what may become a marker, or is a block so far. Owned by one answer.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str], *, is_parallel: bool = True) -> None:
        """Calls of other *names* are none. Unless it *is_parallel*, only the first call is told."""
        self._syntax = syntax
        self._names = names
        self._is_parallel = is_parallel
        self._held = ""
        self._block: BlockReader | None = None
        self._block_at = 0  # where in what is held the block begins, its marker first
        self._body_at = 0  # where its marker ends
        self._is_behind_block = False
        self._has_text = False  # other than white space
        self._follows_call = False  # with nothing told in between
        self._num_calls = 0
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        """What *text* makes sure."""
        self._held += text
        return self._read(is_last=False)

    def end(self) -> list[Delta]:
        """What is left."""
        return self._read(is_last=True)

    def _read(self, is_last: bool) -> list[Delta]:
        self._deltas = []
        while self._step(is_last):
            pass
        return self._deltas

    def _step(self, is_last: bool) -> bool:
        """Read on; whether there may be more to read."""
        if self._is_behind_block:
            return self._skip_trailer(is_last)
        if self._block is None:
            return self._seek(is_last)
        return self._read_block(self._block, is_last)

    def _seek(self, is_last: bool) -> bool:
        """Look for where a block begins, and tell the text before it."""
        begin = self._begin()
        if begin is not None:
            self._block_at, self._body_at = begin
            self._tell(len(self._held[: self._block_at].rstrip()))
            self._block = self._syntax.block(self._body_at)
            return True
        if not is_last:
            sure = self._held[: len(self._held) - num_begun(self._held, self._syntax.markers)]
            self._tell(len(sure.rstrip()))
        elif not (self._follows_call and self._held.isspace()):
            self._tell(len(self._held))
        return False

    def _begin(self) -> tuple[int, int] | None:
        """Where the first marker begins and ends, or twice where a block without one begins."""
        found = [(place, place + len(m)) for m in self._syntax.markers if (place := self._held.find(m)) >= 0]
        if self._syntax.is_bare and not self._has_text:
            place = len(self._held) - len(self._held.lstrip())
            if self._held[place : place + 1] in ("{", "["):
                found.append((place, place))
        return min(found, default=None)

    def _read_block(self, reader: BlockReader, is_last: bool) -> bool:
        try:
            block = reader.read(self._held)
            if block is None and not is_last:
                return False
            self._take(block)
        except NotACall:  # the marker is text, and what follows it is looked at again
            self._tell(max(self._body_at, self._block_at + 1))
        self._block = None
        return True

    def _take(self, block: Block | None) -> None:
        if block is None or any(call.name not in self._names for call in block.calls):
            raise NotACall
        for call in block.calls:
            if self._is_parallel or not self._num_calls:
                self._deltas += [CallBegin(self._num_calls, call.name), ArgumentsDelta(self._num_calls, call.arguments)]
                self._num_calls += 1
        self._held = self._held[block.end :]
        self._is_behind_block = self._follows_call = True

    def _skip_trailer(self, is_last: bool) -> bool:
        rest = self._held.lstrip()
        trailers = self._syntax.trailers
        if found := next((each for each in trailers if rest.startswith(each)), None):
            self._held = rest[len(found) :]
        elif not is_last and any(each.startswith(rest) for each in trailers):
            return False
        self._is_behind_block = False
        return True

    def _tell(self, num_characters: int) -> None:
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        self._block_at -= num_characters
        self._body_at -= num_characters
        if not text:
            return
        self._has_text = self._has_text or not text.isspace()
        self._follows_call = False
        match self._deltas:
            case [*_, TextDelta(before)]:
                self._deltas[-1] = TextDelta(before + text)
            case _:
                self._deltas.append(TextDelta(text))
