"""Document: a text with which many prompts begin, so its KV is computed once and stays cached."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

MAX_PINNED_S = 10 * 365 * 86400.0
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Form(StrEnum):
    """The kind of prompts that a document is for: plain prompts or chats."""

    TEXT = "text"  # the prompt begins with the document's tokens
    CHAT = "chat"  # the first user message of a chat begins with the document, in the chat template's format


@dataclass(eq=False, slots=True)
class Document:
    """A document of one tenant. All prompts about it begin with *token_ids*, whose KV is computed in advance.

    Owned by the event loop. The engine's thread reads a field only while the event loop does not change it.
    """

    id: str
    tenant: str | None
    form: Form
    text: str | None  # None: the client put token ids
    system: str | None  # the system message before the document, in a chat
    token_ids: npt.NDArray[np.int32] = field(repr=False)
    lora: str | None  # the LoRA adapter with which the document is computed; None: the model itself
    cache_salt: str | None = field(repr=False)
    created_at: float  # seconds since 1970, like *pinned_until*
    was_ready: bool = False
    pinned_until: float | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV is computed in advance."""
        return len(self.token_ids)

    def has_content_of(self, other: "Document") -> bool:
        """Return whether *other* has the same text, token ids, form, system message, adapter and cache_salt."""
        mine = (self.form, self.text, self.system, self.lora, self.cache_salt)
        theirs = (other.form, other.text, other.system, other.lora, other.cache_salt)
        return mine == theirs and np.array_equal(self.token_ids, other.token_ids)


def check_id(document_id: str) -> None:
    """Raise ValueError if *document_id* is not valid. "." and ".." have a meaning in URL paths, so they are invalid."""
    if not _ID.fullmatch(document_id) or document_id in (".", ".."):
        raise ValueError('document id: use 1 to 128 of the characters A-Z a-z 0-9 . _ -, but not "." or ".." alone')
