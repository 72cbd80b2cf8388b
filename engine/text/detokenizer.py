"""Detokenizer: text from a growing list of tokens, in pieces that never have to be taken back."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # decoders write this for bytes that are not, or not yet, a character
_CHARACTER_TOKENS = 4  # a character has at most 4 bytes in UTF-8, and a token at least one


def num_begun(text: str, wholes: Sequence[str]) -> int:
    """The length of the longest ending of *text* that one of the *wholes*, which are longer, begins with."""
    longest = max(map(len, wholes), default=1) - 1
    endings = (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in wholes))
    return next(endings, 0)


class Detokenizer:
    """Streams the text of one request, which owns it.

    Invariant: *text* is the pieces that `push` and `flush` gave, joined; after `flush` it is the decoding of all
    tokens, special ones skipped, or what comes before the first stop string in it.
    Held back: bytes that may yet become a character, and an ending that may yet become a stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        shown_token_ids: Collection[int] = (),
    ) -> None:
        """No *stop* string is one that is complete with the first *min_tokens* tokens. Special tokens among
        *shown_token_ids* are a part of the text."""
        self._tokenizer = tokenizer
        self._drops_special = (
            not shown_token_ids
        )  # the decoder does, which is cheaper than to list them: 0.3 ms of 1,000
        self._special_ids = (
            frozenset(tokenizer.all_special_ids) if self._drops_special else _special_ids(tokenizer, shown_token_ids)
        )
        self._stop = tuple(stop)
        self.stopped_by: str | None = None  # the stop string that was found; later tokens add nothing
        self._num_unstoppable = min_tokens  # tokens to come
        self._pieces: list[str] = []
        self._held = ""  # whole characters, held back as the possible beginning of a stop string

        # Only the window is decoded, so a token costs the same anywhere in the text. It begins with context, tokens
        # whose text is out already, because decoders treat a first word in another way (they strip its space).
        self._window: list[int] = []
        self._num_context = 0
        self._num_read = 0  # characters of the window's text that are out, or in `_held`

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stopped_by is not None

    @property
    def text(self) -> str:
        """The pieces given so far, joined."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """The text that *token_id* makes safe to show: often one word, sometimes none, or more than its own."""
        self._num_unstoppable -= 1
        if self.stopped or token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode()

        whole = text.rstrip(_INCOMPLETE)
        if whole == text:
            piece = self._read(whole)
            if piece:  # the tokens of this piece are context enough for the next
                self._slide(self._num_context, num_context=len(self._window) - self._num_context, num_waiting=0)
            elif self._num_context:  # a token without text, such as an id beyond the vocabulary
                self._window.pop()
            else:  # a space that is stripped where a text begins: without it the next one would be
                self._num_context = len(self._window)
        elif len(self._window) - self._num_context < _CHARACTER_TOKENS:
            piece = self._read(whole)
        else:  # the first incomplete bytes are garbage or done: only the last mark can become a character
            piece = self._read(text[:-1])
            self._slide(-2 * _CHARACTER_TOKENS, num_context=0, num_waiting=1)
        return self._show(piece)

    def flush(self) -> str:
        """The text that is still held back, now that the tokens have ended."""
        if self.stopped:
            return ""
        return self._show(self._read(self._decode()), last=True)

    def _decode(self) -> str:
        # Without the tidying of spaces before punctuation, which would change text that is out already.
        text = self._tokenizer.decode(
            self._window, skip_special_tokens=self._drops_special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # a list would be the answer to several lists
        return text

    def _read(self, text: str) -> str:
        """Read on in *text*, the beginning of the window's text: the part that was not read before."""
        piece = text[self._num_read :]
        self._num_read += len(piece)
        return piece

    def _slide(self, start: int, num_context: int, num_waiting: int) -> None:
        """Move the window's beginning to its token *start*; all but its last *num_waiting* characters count as read."""
        self._window = self._window[start:]
        self._num_context = num_context
        self._num_read = len(self._decode()) - num_waiting

    def _show(self, piece: str, last: bool = False) -> str:
        """Give out the held text and *piece*, up to a stop string, or to what may become one, unless *last*."""
        text = self._held + piece
        hits = [] if self._num_unstoppable >= 0 else self._hits(text)
        if hits:  # the stop string that is complete first, however the text was cut into tokens
            _, num_shown, self.stopped_by = min(hits)
        else:
            num_shown = len(text) if last else len(text) - num_begun(text, self._stop)
        self._held = "" if self.stopped else text[num_shown:]
        self._pieces.append(text[:num_shown])
        return text[:num_shown]

    def _hits(self, text: str) -> list[tuple[int, int, str]]:
        """End, beginning and text of the first of each stop string that ends in *text* behind what was held back."""
        starts = {stop: max(0, len(self._held) - len(stop) + 1) for stop in self._stop}
        return [(at + len(stop), at, stop) for stop, start in starts.items() if (at := text.find(stop, start)) >= 0]


def _special_ids(tokenizer: PreTrainedTokenizerBase, shown_token_ids: Collection[int]) -> frozenset[int]:
    """Tokens that are no part of a text, such as the end token, but those that are shown."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(marked.union(tokenizer.all_special_ids).difference(shown_token_ids))
