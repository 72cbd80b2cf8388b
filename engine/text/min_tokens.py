"""A lower bound for the number of tokens of a text, found without tokenizing all of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

PIECE = 4  # characters of a piece, per token of the limit; a token of ordinary text has about as many
_FREE = 2  # texts of up to this many pieces are not examined, because tokenizing them takes no longer
_MAX_DECOMPOSED = 4  # characters that one composed character may stand for (U+1F82 and similar; NFC)
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits"})  # these drop no part of a text


class TooManyTokens(ValueError):
    """Raised if a text has more tokens than its *limit*.

    *min_num_tokens* is a lower bound for the number of tokens, because the text was not tokenized to its end.
    """

    def __init__(self, min_num_tokens: int, limit: int) -> None:
        super().__init__(f"it has at least {min_num_tokens} tokens, more than the limit of {limit}; shorten it")
        self.min_num_tokens = min_num_tokens
        self.limit = limit


class MinTokens:
    """A thread-safe check that rejects a text that is too long, faster than tokenizing the text would.

    The first check divides the text's length by the length of the longest token. The result is a lower bound only if
    the tokenizer drops no part of a text and has no token that stands for several unknown characters. The check is
    skipped unless the tokenizer's configuration shows that both are true.

    The second check tokenizes one piece of the text after another until the limit is exceeded. It counts the tokens
    before the last word of a piece, because these do not depend on the text after the piece. The check is skipped for a
    tokenizer that does not divide texts into words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        described = {} if self._backend is None else json.loads(self._backend.to_str())
        self._decomposes = _kinds(described.get("normalizer")) & {"NFC", "NFKC"} != set()
        self.longest_token = _longest_token(described)

    def check(self, text: str, limit: int) -> None:
        """Raise TooManyTokens if *text* surely has more than *limit* tokens. A text that passes may have more."""
        longest = self.longest_token
        if longest is not None and not text.isascii() and self._decomposes:
            longest *= _MAX_DECOMPOSED
        if longest is not None and len(text) > longest * limit:
            raise TooManyTokens(-(-len(text) // longest), limit)
        if self._backend is not None and len(text) > PIECE * _FREE * limit:
            self._look(self._backend, text, limit)

    def _look(self, backend: Tokenizer, text: str, limit: int) -> None:
        start, min_num_tokens, length = 0, 0, PIECE * max(1, limit)
        while len(text) - start > length:
            (encoding,) = backend.encode_batch([text[start : start + length]], add_special_tokens=False)
            words = encoding.word_ids
            last = next((word for word in reversed(words) if word is not None), None)
            if last is None or (span := encoding.word_to_chars(last)) is None or not span[0]:
                return  # the piece has at most one word, so no tokens before its last word
            min_num_tokens += words.index(last)
            if min_num_tokens > limit:
                raise TooManyTokens(min_num_tokens, limit)
            start += span[0]


def _longest_token(described: Mapping[str, Any]) -> int | None:
    """Return the maximum number of characters of a token; None if that is unlimited or unknown."""
    model = described.get("model") or {}
    swallows = any(token["lstrip"] or token["rstrip"] for token in described.get("added_tokens", ()))
    if swallows or model.get("type") != "BPE" or not _keeps_all(described) or not _knows_all(described):
        return None
    added = (token["content"] for token in described["added_tokens"])
    return max((len(token) for token in (*model["vocab"], *added)), default=None)


def _keeps_all(described: Mapping[str, Any]) -> bool:
    """Return whether normalizer and pre-tokenizer drop no character. Composing two into one (NFC) is allowed."""
    return all(map(_keeping_normalizer, _parts(described.get("normalizer"), "normalizers"))) and all(
        map(_keeping_pre_tokenizer, _parts(described.get("pre_tokenizer"), "pretokenizers"))
    )


def _keeping_normalizer(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":  # only if it replaces a string, not a pattern, by one at least as long
        replaced = part["pattern"].get("String")
        return replaced is not None and len(part["content"]) >= len(replaced)
    return part["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel")


def _keeping_pre_tokenizer(part: Mapping[str, Any]) -> bool:
    if part["type"] in ("Split", "Punctuation"):
        return str(part["behavior"]).lower() != "removed"
    return part["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_all(described: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer's BPE model drops no character, and merges no unknown characters into one token."""
    model, vocab = described["model"], described["model"]["vocab"]
    if "ByteLevel" in _kinds(described.get("pre_tokenizer")) | _kinds(described.get("normalizer")):
        return all(symbol in vocab for symbol in ByteLevel.alphabet())
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return True
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _kinds(part: Mapping[str, Any] | None) -> set[str]:
    return {each["type"] for key in ("normalizers", "pretokenizers") for each in _parts(part, key)}


def _parts(part: Mapping[str, Any] | None, key: str) -> Iterable[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer: the members of a sequence, otherwise *part* itself."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for each in part.get(key, ()):
        yield from _parts(each, key)


class UnknownToken(ValueError):
    """Raised for a token id that the tokenizer does not have. The message gives the valid range."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Checks of a prompt: at most *max_tokens* tokens, with ids below *num_ids*."""

    min_tokens: MinTokens
    num_ids: int
    max_tokens: int

    def check_text(self, text: str) -> None:
        """Raise TooManyTokens if *text* surely has more than *max_tokens* tokens. A text that passes may have more."""
        self.min_tokens.check(text, self.max_tokens)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise UnknownToken if the tokenizer does not have one of the ids."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.num_ids:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.num_ids)
            raise UnknownToken(f"token id {wrong}: the tokenizer has 0 to {self.num_ids - 1} only")
