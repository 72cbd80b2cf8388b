"""TokenBans: the tokens that one request must not sample next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedTokenizerBase

from kvtier.engine.model.sampling import InvalidParameter, SamplingParams


@dataclass(frozen=True, slots=True)
class TokenBans:
    """The rules that ban tokens from one request's output: its minimum length and its bad words.

    End tokens are banned until the output has *min_tokens* tokens. The last token of a bad word is banned if the output
    ends with the word's other tokens.
    """

    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # the token ids of each word, at least one

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: frozenset[int],
        vocab_size: int,
    ) -> Self:
        """Return the bans of *params*, given the model's *end_token_ids*.

        Raises:
            InvalidParameter: If a bad word has a token that the model has no logit for.
        """
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else end_token_ids)
        bad_words = _tokenized(tokenizer, params.bad_words) if params.bad_words else ()
        if worst := max((token_id for word in bad_words for token_id in word if token_id >= vocab_size), default=0):
            raise InvalidParameter("bad_words", f"has token id {worst}; the model knows 0 to {vocab_size - 1}")
        known = tuple(sorted(token_id for token_id in ends if 0 <= token_id < vocab_size))
        return cls(params.min_tokens, known if params.min_tokens else (), bad_words)

    def after(self, output: Sequence[int]) -> Iterator[int]:
        """Yield the tokens that must not follow the token ids *output*, possibly with duplicates."""
        if len(output) < self.min_tokens:
            yield from self.end_token_ids
        for *beginning, last in self.bad_words:
            if not beginning or list(output[-len(beginning) :]) == beginning:
                yield last

    def __bool__(self) -> bool:
        """Return whether any token may be banned."""
        return bool(self.end_token_ids or self.bad_words)


NO_BANS = TokenBans()


def _tokenized(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, as tokenized at the start of a text and after a space.

    The second form is added only if its first token differs and both forms have the same number of tokens.
    Source: vLLM `SamplingParams.update_from_tokenizer`.
    """
    stripped = [word.lstrip() for word in words]
    texts = stripped + [f" {word}" for word in stripped]
    token_ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found: list[list[int]] = []
    for first, within in zip(token_ids[: len(words)], token_ids[len(words) :], strict=True):
        found.append(first)
        if first and within and within[0] != first[0] and len(within) == len(first):
            found.append(within)
    return tuple(tuple(word) for word in found if word)
