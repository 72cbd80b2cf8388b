"""TokenText: the text of single tokens, as log probabilities name them."""

from transformers import PreTrainedTokenizerBase

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say; OpenAI's


class TokenText:
    """Decodes tokens one at a time; special ones too. Owned by one request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int) -> str:
        """Its text; U+FFFD for bytes that are only a part of a character."""
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list would be the answer to several lists
        return text


def finite(logprob: float) -> float:
    """*logprob*, as JSON can say it."""
    return max(logprob, LEAST_LOGPROB)
