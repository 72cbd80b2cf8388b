"""FreeReader: finds tool calls in an answer that no grammar has restricted. Text that is not a call stays text."""

from collections.abc import Collection

from kvtier.engine.text.detokenizer import num_begun
from kvtier.server.tool_calls.call_syntax import Block, BlockReader, CallSyntax, NotACall
from kvtier.server.tool_calls.deltas import ArgumentsDelta, CallBegin, Delta, TextDelta


class FreeReader:
    """A `Reader` that reports a tool call only once the call is complete and valid, because no delta can be taken back.

    White space before a call and separators between calls are not reported. Each answer needs a new reader.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str], *, is_parallel: bool = True) -> None:
        """Create a reader that recognizes calls of the tools *names*. Calls of other tools stay text.

        Unless *is_parallel*, only the first call is reported.
        """
        self._syntax = syntax
        self._names = names
        self._is_parallel = is_parallel
        self._held = ""  # text that is not reported yet: white space, then a possible marker or an incomplete block
        self._block: BlockReader | None = None
        self._block_at = 0  # where the block, with its marker, begins in `_held`
        self._body_at = 0  # where the block's marker ends
        self._is_behind_block = False
        self._has_text = False  # text other than white space was reported
        self._follows_call = False  # the last reported delta was of a call
        self._num_calls = 0
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        self._held += text
        return self._read(is_last=False)

    def end(self) -> list[Delta]:
        return self._read(is_last=True)

    def _read(self, is_last: bool) -> list[Delta]:
        self._deltas = []
        while self._step(is_last):
            pass
        return self._deltas

    def _step(self, is_last: bool) -> bool:
        if self._is_behind_block:
            return self._skip_trailer(is_last)
        if self._block is None:
            return self._seek(is_last)
        return self._read_block(self._block, is_last)

    def _seek(self, is_last: bool) -> bool:
        """Look for the beginning of a block of tool calls, and report the text before it."""
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
        """Find the next block of tool calls in `_held`, the text that is not reported yet.

        Returns two indexes: where the block begins, and where its marker (such as "<tool_call>") ends. They are equal
        if the block has no marker. Returns None if no block begins.
        """
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
        except NotACall:  # the marker is text; look again at the text after it
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
