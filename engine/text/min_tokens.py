"""MinTokens: a lower bound of a text's tokens, found without tokenizing all of it."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

PIECE = 4  # characters per token of the limit that are looked at together: about what a token of a usual text has
_FREE = 2  # a text of so few pieces is not looked at: tokenizing it tells as soon
_MAX_DECOMPOSED = 4  # characters that one composed character may stand for (U+1F82 and its like; NFC)
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits"})  # these drop nothing of a text


class TooManyTokens(ValueError):
    """A text has more tokens than it may; at least *num_least* were found, without reading all of it."""

    def __init__(self, min_num_tokens: int, limit: int) -> None:
        super().__init__(f"it has {min_num_tokens} tokens or more, and may have {limit}; shorten it")
        self.min_num_tokens = min_num_tokens
        self.limit = limit


class MinTokens:
    """Refuses texts that are too long, in less time than it takes to tokenize them. Many threads may use it.

    First by length: no token is longer than the longest of the vocabulary. That bound is sound only where the tokenizer
    drops nothing of a text and has no token that stands for a run of unknown characters. So the tokenizer's own
    description is read; one with parts that this module does not know gives no such bound. Then by tokenizing one piece
    after another, until there are more tokens than allowed. The tokens before the last word of a piece do not depend on
    the text behind it, and count; texts of a tokenizer that knows no words are bounded by length only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        described = {} if self._backend is None else json.loads(self._backend.to_str())
        self._decomposes = _kinds(described.get("normalizer")) & {"NFC", "NFKC"} != set()
        self.longest_token = _longest_token(described)

    def check(self, text: str, limit: int) -> None:
        """TooManyTokens if *text* is sure to have more than *limit* tokens; a text that passes may still have more."""
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
                return  # one word, or none that counts
            min_num_tokens += words.index(last)
            if min_num_tokens > limit:
                raise TooManyTokens(min_num_tokens, limit)
            start += span[0]


def _longest_token(described: Mapping[str, Any]) -> int | None:
    """The most characters of a text that a token stands for; None if that is unbounded or not known."""
    model = described.get("model") or {}
    swallows = any(token["lstrip"] or token["rstrip"] for token in described.get("added_tokens", ()))
    if swallows or model.get("type") != "BPE" or not _keeps_all(described) or not _knows_all(described):
        return None
    added = (token["content"] for token in described["added_tokens"])
    return max((len(token) for token in (*model["vocab"], *added)), default=None)


def _keeps_all(described: Mapping[str, Any]) -> bool:
    """Whether every character of a text reaches the tokenizer's model, except those that NFC composes."""
    return all(map(_keeping_normalizer, _parts(described.get("normalizer"), "normalizers"))) and all(
        map(_keeping_pre_tokenizer, _parts(described.get("pre_tokenizer"), "pretokenizers"))
    )


def _keeping_normalizer(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":  # only of a string, not of a pattern, by one at least as long
        replaced = part["pattern"].get("String")
        return replaced is not None and len(part["content"]) >= len(replaced)
    return part["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel")


def _keeping_pre_tokenizer(part: Mapping[str, Any]) -> bool:
    if part["type"] in ("Split", "Punctuation"):
        return str(part["behavior"]).lower() != "removed"
    return part["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_all(described: Mapping[str, Any]) -> bool:
    """Whether the tokenizer's model gives every character a token, and each unknown one a token of its own."""
    model, vocab = described["model"], described["model"]["vocab"]
    if "ByteLevel" in _kinds(described.get("pre_tokenizer")) | _kinds(described.get("normalizer")):
        return all(symbol in vocab for symbol in ByteLevel.alphabet())
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return True
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _kinds(part: Mapping[str, Any] | None) -> set[str]:
    return {each["type"] for key in ("normalizers", "pretokenizers") for each in _parts(part, key)}


def _parts(part: Mapping[str, Any] | None, key: str) -> Iterable[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, of which a sequence has several."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for each in part.get(key, ()):
        yield from _parts(each, key)
