"""PrefixedText: a text that is tokenized once, and how many of its tokens each of its beginnings has."""

from bisect import bisect_left

from transformers import BatchEncoding, PreTrainedTokenizerBase

from kvtier.engine.text.prompt_limit import PromptLimit


class PrefixedText:
    """The tokens of a prompt's whole text, without special tokens beside those in the text. Owned by its caller."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, limit: PromptLimit) -> None:
        """`TooManyTokens` for a text beyond the *limit*."""
        limit.check_text(text)
        self._tokenizer = tokenizer
        self._text = text
        self._encoding: BatchEncoding = tokenizer(text, add_special_tokens=False)
        self.token_ids: list[int] = self._encoding["input_ids"]

    def num_tokens_shared(self, other: str) -> int:
        """How many tokens lie wholly in the beginning that the text and *other* have in common."""
        num_chars = num_common(self._text, other)
        if num_chars == len(self._text):
            return len(self.token_ids)
        if not self._tokenizer.is_fast:  # it does not tell which characters a token has
            beginning = self._tokenizer(self._text[:num_chars], add_special_tokens=False)["input_ids"]
            return num_common(self.token_ids, beginning)
        for place in range(num_chars, len(self._text)):  # a character may be no token's, such as a stripped space
            token = self._encoding.char_to_token(place)
            if token is not None:
                return int(token)
        return len(self.token_ids)


def num_common(one: str | list[int], other: str | list[int]) -> int:
    """How many characters, or token ids, *one* and *other* begin with in common."""
    # By halves: a loop over the characters of a document takes milliseconds, a comparison of its half microseconds.
    longest = min(len(one), len(other))
    return bisect_left(range(longest), True, key=lambda place: one[: place + 1] != other[: place + 1])
