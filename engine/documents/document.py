"""Document: what questions will be asked about, so that it is computed once and kept."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

MOST_PINNED_S = 10 * 365 * 86400.0
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Form(StrEnum):
    """How a document stands in the prompts that name it, and so which tokens are computed ahead."""

    TEXT = "text"  # its tokens are the beginning of the prompt
    CHAT = "chat"  # it begins the first user message of a conversation, as the chat template writes that


@dataclass(eq=False, slots=True)
class Document:
    """One document of one tenant. Owned by the event loop; what the engine's thread reads of it never changes.

    *token_ids* are what is computed ahead: the beginning that all prompts about the document have in common.
    """

    id: str
    tenant: str | None
    form: Form
    text: str | None  # None: it was put as token ids
    system: str | None  # of a chat: the system message before it
    token_ids: npt.NDArray[np.int32] = field(repr=False)
    lora: str | None  # the adapter whose keys and values these are; None: the model's own
    cache_salt: str | None = field(repr=False)
    created_at: float  # seconds since 1970, as all times here
    was_ready: bool = False
    pinned_until: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed ahead."""
        return len(self.token_ids)

    def is_as(self, other: "Document") -> bool:
        """Whether *other* says the same, in the same way."""
        mine = (self.form, self.text, self.system, self.lora, self.cache_salt)
        theirs = (other.form, other.text, other.system, other.lora, other.cache_salt)
        return mine == theirs and np.array_equal(self.token_ids, other.token_ids)


def check_id(document_id: str) -> None:
    """ValueError unless it can be the id of a document: clients take "." and ".." in a path for something else."""
    if not _ID.fullmatch(document_id) or document_id in (".", ".."):
        raise ValueError('document id: use 1 to 128 of the characters A-Z a-z 0-9 . _ -, but not "." or ".." alone')
