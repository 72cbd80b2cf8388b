"""TokenText: the text of single tokens, by which log probabilities name them, and of whole prompts."""

from transformers import PreTrainedTokenizerBase

from kvtier.engine.server.prompt import Prompt

LEAST_LOGPROB = -9999.0  # OpenAI's number for minus infinity


class TokenText:
    """Decodes tokens one at a time, special ones too. Owned by one request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # a prompt has its words many times

    def of(self, token_id: int) -> str:
        """The text of a token; U+FFFD for bytes that are only a part of a character."""
        if token_id not in self._known:
            text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            assert isinstance(text, str)  # a list comes only for several lists
            self._known[token_id] = text
        return self._known[token_id]

    def of_prompt(self, prompt: Prompt) -> str:
        """The prompt's text, as the client gave it, or as its tokens say it."""
        if prompt.text is not None:
            return prompt.text
        text = self._tokenizer.decode(list(prompt.token_ids), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def finite(logprob: float) -> float:
    """*logprob*, or -9999.0 for minus infinity, which JSON does not have."""
    return max(logprob, LEAST_LOGPROB)
