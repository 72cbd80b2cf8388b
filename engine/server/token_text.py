"""TokenText: the text of single tokens, by which log probabilities name them."""

from transformers import PreTrainedTokenizerBase

LEAST_LOGPROB = -9999.0  # OpenAI's number for minus infinity


class TokenText:
    """Decodes tokens one at a time, special ones too. Owned by one request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int) -> str:
        """The text of a token; U+FFFD for bytes that are only a part of a character."""
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list comes only for several lists
        return text


def finite(logprob: float) -> float:
    """*logprob*, or -9999.0 for minus infinity, which JSON does not have."""
    return max(logprob, LEAST_LOGPROB)
