"""TokenText: decodes single tokens, for the log probabilities in answers, and whole prompts."""

import re
from collections.abc import Sequence
from functools import cache

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.server.answers import PromptLogprob, PromptLogprobs
from kvtier.server.prompt import Prompt

MIN_LOGPROB = -9999.0  # OpenAI's number for minus infinity
_PART_OF_A_CHARACTER = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte, as tokenizers with byte fallback write it


class TokenText:
    """A decoder of single tokens, including special tokens, and of prompts. Owned by one request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # a cache, because a prompt repeats its tokens

    def of(self, token_id: int) -> str:
        """Return the text of a token. U+FFFD replaces bytes that are only a part of a character."""
        if token_id not in self._known:
            text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            assert isinstance(text, str)  # decode returns a list only for several lists
            self._known[token_id] = text
        return self._known[token_id]

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token stands for; None if they are unknown. They may be a part of a character."""
        text = self.of(token_id)
        if _PART_OF_A_CHARACTER not in text:
            return text.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):  # an id that the tokenizer does not have
            return None
        if (byte := _BYTE.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        values = [_byte_of().get(character) for character in token]
        return None if None in values else bytes(value for value in values if value is not None)

    def name_of(self, token_id: int) -> str:
        """Return the text of a token, or `bytes:…` with its bytes if it is only a part of a character."""
        text, content = self.of(token_id), self.bytes_of(token_id)
        if _PART_OF_A_CHARACTER not in text or content is None:
            return text
        return "bytes:" + "".join(f"\\x{value:02x}" for value in content)

    def of_prompt(self, prompt: Prompt) -> str:
        """Return the prompt's text as the client sent it. If it was not sent as text, decode its tokens."""
        if prompt.text is not None:
            return prompt.text
        text = self._tokenizer.decode(list(prompt.token_ids), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte for each character in tokens of a byte-level tokenizer, such as GPT-2's.

    Such a tokenizer writes a printable byte as the character with the same number. It writes the other bytes, in order,
    as U+0100, U+0101 and so on.
    """
    own = {value for value in range(256) if chr(value) in ByteLevel.alphabet()}
    others = (value for value in range(256) if value not in own)
    return {chr(value): value for value in own} | {chr(256 + number): value for number, value in enumerate(others)}


def finite(logprob: float) -> float:
    """Return *logprob*, but at least -9999.0, because JSON has no minus infinity."""
    return max(logprob, MIN_LOGPROB)


def prompt_logprobs(told: Sequence[TokenLogprobs | None], num_top: int, text: TokenText) -> PromptLogprobs:
    """Return the log probabilities of a prompt's tokens in vLLM's format.

    The list has one item for each token of the prompt. An item maps token ids to log probabilities: those of the token
    itself, and of the *num_top* likeliest tokens at its position. It is None for a token without log probabilities.
    """
    return [None if item is None else _of_token(item, num_top, text) for item in told]


def _of_token(item: TokenLogprobs, num_top: int, text: TokenText) -> dict[str, PromptLogprob]:
    likeliest = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(item.top[:num_top], 1)]
    found: dict[str, PromptLogprob] = {}
    for token_id, logprob, rank in [(item.token_id, item.logprob, item.rank), *likeliest]:
        told = PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text.of(token_id))
        found.setdefault(str(token_id), told)
    return found
