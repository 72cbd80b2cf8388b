"""The maximum length and valid token ids of a prompt, checked before it is tokenized."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.engine.text.min_tokens import MinTokens


class UnknownToken(ValueError):
    """Raised for a token id that the tokenizer does not have; the message gives the valid range."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """A limit of *max_tokens* tokens, for a tokenizer with ids below *num_ids*."""

    min_tokens: MinTokens
    num_ids: int
    max_tokens: int

    def check_text(self, text: str) -> None:
        """Raise TooManyTokens if *text* surely has more than *max_tokens* tokens. A text that passes may have more."""
        self.min_tokens.check(text, self.max_tokens)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise UnknownToken unless the tokenizer has all of the ids."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.num_ids:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.num_ids)
            raise UnknownToken(f"token id {wrong}: the tokenizer has 0 to {self.num_ids - 1}")
