"""LeastTokens: how many tokens a text has at least, known without tokenizing all of it."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

PIECE = 4  # characters per token of the limit that are looked at together: about what a token of a usual text has
_FREE = 2  # pieces that are not worth a look: tokenizing them is what finds out
_MOST_DECOMPOSED = 4  # characters that one composed character may stand for (U+1F82 and its like; NFC)
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits"})  # nothing of the text is left out


class TooManyTokens(ValueError):
    """A text has more tokens than it may; *num_least* of them were counted before its end was reached."""

    def __init__(self, num_least: int, most: int) -> None:
        super().__init__(f"it has {num_least} tokens or more, and may have {most}; shorten it")
        self.num_least = num_least
        self.most = most


class LeastTokens:
    """Refuses texts that are too long for less than it would take to tokenize them. May be used by many threads.

    First by length: no token is longer than the longest of the vocabulary. That is only sound where the tokenizer
    drops nothing of a text and has no token for whatever it does not know; so the tokenizer's own description is read,
    and what it says that is not known here means that there is no such bound. Then by looking at one piece after
    another, until there are more tokens than there may be. What stands before the last word of a piece does not
    depend on what comes after it, and counts; a tokenizer that knows no words is only bounded by length.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        described = {} if self._backend is None else json.loads(self._backend.to_str())
        self._decomposes = _kinds(described.get("normalizer")) & {"NFC", "NFKC"} != set()
        self.longest_token = _longest_token(described)

    def check(self, text: str, most: int) -> None:
        """TooManyTokens if *text* is sure to have more than *most*. It may have more than that if it returns."""
        longest = self.longest_token
        if longest is not None and not text.isascii() and self._decomposes:
            longest *= _MOST_DECOMPOSED
        if longest is not None and len(text) > longest * most:
            raise TooManyTokens(-(-len(text) // longest), most)
        if self._backend is not None and len(text) > PIECE * _FREE * most:
            self._look(self._backend, text, most)

    def _look(self, backend: Tokenizer, text: str, most: int) -> None:
        start, num_least, length = 0, 0, PIECE * max(1, most)
        while len(text) - start > length:
            (encoding,) = backend.encode_batch([text[start : start + length]], add_special_tokens=False)
            words = encoding.word_ids
            last = next((word for word in reversed(words) if word is not None), None)
            if last is None or (span := encoding.word_to_chars(last)) is None or not span[0]:
                return  # one word, or nothing that counts
            num_least += words.index(last)
            if num_least > most:
                raise TooManyTokens(num_least, most)
            start += span[0]


def _longest_token(described: Mapping[str, Any]) -> int | None:
    """Characters of a text that a token stands for at most; None if that has no end, or is not known."""
    model = described.get("model") or {}
    swallows = any(token["lstrip"] or token["rstrip"] for token in described.get("added_tokens", ()))
    if swallows or model.get("type") != "BPE" or not _keeps_all(described) or not _knows_all(described):
        return None
    added = (token["content"] for token in described["added_tokens"])
    return max((len(token) for token in (*model["vocab"], *added)), default=None)


def _keeps_all(described: Mapping[str, Any]) -> bool:
    """Whether every character of a text comes to the model, but for what NFC composes."""
    return all(map(_keeping_normalizer, _parts(described.get("normalizer"), "normalizers"))) and all(
        map(_keeping_pre_tokenizer, _parts(described.get("pre_tokenizer"), "pretokenizers"))
    )


def _keeping_normalizer(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":  # of a string, not of a pattern, by one that is as long
        replaced = part["pattern"].get("String")
        return replaced is not None and len(part["content"]) >= len(replaced)
    return part["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel")


def _keeping_pre_tokenizer(part: Mapping[str, Any]) -> bool:
    if part["type"] in ("Split", "Punctuation"):
        return str(part["behavior"]).lower() != "removed"
    return part["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_all(described: Mapping[str, Any]) -> bool:
    """Whether the model has tokens for every character, at least one for each that is unknown."""
    model, vocab = described["model"], described["model"]["vocab"]
    if "ByteLevel" in _kinds(described.get("pre_tokenizer")) | _kinds(described.get("normalizer")):
        return all(symbol in vocab for symbol in ByteLevel.alphabet())
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return True
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _kinds(part: Mapping[str, Any] | None) -> set[str]:
    return {each["type"] for key in ("normalizers", "pretokenizers") for each in _parts(part, key)}


def _parts(part: Mapping[str, Any] | None, key: str) -> Iterable[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer that may be a sequence of some."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for each in part.get(key, ()):
        yield from _parts(each, key)
