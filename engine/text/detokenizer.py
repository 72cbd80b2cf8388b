"""Conversion of a growing list of tokens to text, in pieces that never have to be retracted."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # the replacement character, to which bytes decode that are not a character, or not yet
_CHARACTER_TOKENS = 4  # a character has at most 4 bytes in UTF-8, and a token at least one


def num_begun(text: str, wholes: Sequence[str]) -> int:
    """Return the length of the longest suffix of *text* that is a proper prefix of one of *wholes*."""
    longest = max(map(len, wholes), default=1) - 1
    endings = (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in wholes))
    return next(endings, 0)


class Detokenizer:
    """A converter of one request's tokens to text that can be streamed. Owned by the request.

    `push` returns only text that later tokens cannot change. It holds back the bytes of an incomplete character, and a
    suffix that may become a stop string. After `flush`, *text* is the decoding of all tokens except special ones, up to
    the first stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        shown_token_ids: Collection[int] = (),
    ) -> None:
        """Create a converter that has received no tokens.

        A *stop* string that is complete within the first *min_tokens* tokens is ignored. The text includes special
        tokens only if they are among *shown_token_ids*.
        """
        self._tokenizer = tokenizer
        # If no special token is shown, the decoder drops them all. This saves listing them: 0.3 ms for 1,000 tokens.
        self._drops_special = not shown_token_ids
        self._special_ids = (
            frozenset(tokenizer.all_special_ids) if self._drops_special else _special_ids(tokenizer, shown_token_ids)
        )
        self._stop = tuple(stop)
        self.stopped_by: str | None = None  # the stop string that was found; later tokens add nothing
        self._num_unstoppable = min_tokens  # number of coming tokens during which no stop string counts
        self._pieces: list[str] = []
        self._held = ""  # whole characters, held back as the possible beginning of a stop string

        # Only the window is decoded, so each token costs the same, however long the text is. The window begins with
        # context: tokens whose text has already been returned, because decoders strip the space of a first word.
        self._window: list[int] = []
        self._num_context = 0
        self._num_read = 0  # characters of the window's text that were returned or are in `_held`

    @property
    def stopped(self) -> bool:
        """True if a stop string was found."""
        return self.stopped_by is not None

    @property
    def text(self) -> str:
        """Concatenation of all pieces that `push` and `flush` have returned."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now safe to show: often one word, sometimes none or several."""
        self._num_unstoppable -= 1
        if self.stopped or token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode()

        whole = text.rstrip(_INCOMPLETE)
        if whole == text:
            piece = self._read(whole)
            if piece:  # the tokens of this piece are enough context for the next
                self._slide(self._num_context, num_context=len(self._window) - self._num_context, num_waiting=0)
            elif self._num_context:  # a token without text, such as an id beyond the vocabulary
                self._window.pop()
            else:  # a space stripped at the start of a text: as context, it keeps the next space from being stripped
                self._num_context = len(self._window)
        elif len(self._window) - self._num_context < _CHARACTER_TOKENS:
            piece = self._read(whole)
        else:  # older bytes never become a character; the last replacement character still may
            piece = self._read(text[:-1])
            self._slide(-2 * _CHARACTER_TOKENS, num_context=0, num_waiting=1)
        return self._show(piece)

    def flush(self) -> str:
        """Return the text that is still held back. Call this after the last token."""
        if self.stopped:
            return ""
        return self._show(self._read(self._decode()), last=True)

    def _decode(self) -> str:
        # Without cleaning up spaces before punctuation, which would change text that was already returned.
        text = self._tokenizer.decode(
            self._window, skip_special_tokens=self._drops_special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # it would be a list only for several lists of tokens
        return text

    def _read(self, text: str) -> str:
        """Return the unread characters of *text*, which is the decoded `_window` or its beginning."""
        piece = text[self._num_read :]
        self._num_read += len(piece)
        return piece

    def _slide(self, start: int, num_context: int, num_waiting: int) -> None:
        """Remove the tokens before index *start* from `_window`, and count the next *num_context* tokens as context.

        `_read` then skips the text of the remaining tokens, except its last *num_waiting* characters.
        """
        self._window = self._window[start:]
        self._num_context = num_context
        self._num_read = len(self._decode()) - num_waiting

    def _show(self, piece: str, last: bool = False) -> str:
        """Append *piece* to the held-back text, and return the part that is safe to show.

        This part ends where a stop string begins. Without one, it ends before a suffix that may become a stop string.
        If *piece* is the *last* one, no suffix is held back.
        """
        text = self._held + piece
        hits = [] if self._num_unstoppable >= 0 else self._hits(text)
        if hits:  # take the stop string that is complete first, however the text is divided into tokens
            _, num_shown, self.stopped_by = min(hits)
        else:
            num_shown = len(text) if last else len(text) - num_begun(text, self._stop)
        self._held = "" if self.stopped else text[num_shown:]
        self._pieces.append(text[:num_shown])
        return text[:num_shown]

    def _hits(self, text: str) -> list[tuple[int, int, str]]:
        """Return the first match of each stop string in *text*, as (end, start, stop string).

        *text* is the held-back text `_held` and new text behind it. A match that ends within `_held` is ignored.
        """
        starts = {stop: max(0, len(self._held) - len(stop) + 1) for stop in self._stop}
        return [(at + len(stop), at, stop) for stop, start in starts.items() if (at := text.find(stop, start)) >= 0]


def _special_ids(tokenizer: PreTrainedTokenizerBase, shown_token_ids: Collection[int]) -> frozenset[int]:
    """Return the ids of special tokens, such as the end token, except those in *shown_token_ids*."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(marked.union(tokenizer.all_special_ids).difference(shown_token_ids))
