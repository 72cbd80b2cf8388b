"""PrefixedText: a text that is tokenized once, and the number of tokens of each of its prefixes."""

from bisect import bisect_left

from transformers import BatchEncoding, PreTrainedTokenizerBase

from kvtier.engine.text.min_tokens import PromptLimit


class PrefixedText:
    """A prompt's text with its tokens, which can be compared with other texts without tokenizing it again.

    The tokenizer adds no special tokens. Owned by its caller.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, limit: PromptLimit) -> None:
        """Tokenize *text*. Raises `TooManyTokens` if it exceeds the *limit*."""
        limit.check_text(text)
        self._tokenizer = tokenizer
        self._text = text
        self._encoding: BatchEncoding = tokenizer(text, add_special_tokens=False)
        self.token_ids: list[int] = self._encoding["input_ids"]

    def num_common_tokens(self, other: str) -> int:
        """Return how many tokens lie completely within the common prefix of this text and *other*."""
        num_chars = num_common(self._text, other)
        if num_chars == len(self._text):
            return len(self.token_ids)
        if not self._tokenizer.is_fast:  # slow tokenizers do not map characters to tokens
            beginning = self._tokenizer(self._text[:num_chars], add_special_tokens=False)["input_ids"]
            return num_common(self.token_ids, beginning)
        for place in range(num_chars, len(self._text)):  # a character may belong to no token, such as a stripped space
            token = self._encoding.char_to_token(place)
            if token is not None:
                return int(token)
        return len(self.token_ids)


def num_common(one: str | list[int], other: str | list[int]) -> int:
    """Return the length of the common prefix of *one* and *other*, in characters or token ids."""
    # Binary search, because comparing half a document takes microseconds and a loop over its characters milliseconds.
    longest = min(len(one), len(other))
    return bisect_left(range(longest), True, key=lambda place: one[: place + 1] != other[: place + 1])
