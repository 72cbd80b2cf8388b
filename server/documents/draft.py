"""Draft: a document as the client sends it, before it is tokenized."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from transformers import PreTrainedTokenizerBase

from kvtier.engine.llm import encode
from kvtier.engine.text.chat_prefix import chat_prefix
from kvtier.engine.text.min_tokens import PromptLimit
from kvtier.server.documents.document import Form
from kvtier.tiers.naming.request_text import check_text


@dataclass(frozen=True, slots=True)
class Draft:
    """A document that a client wants to store, as *text* or as *token_ids*.

    If *form* is None, a text is for chats if the tokenizer has a chat template, and for plain prompts if not. Token ids
    are for plain prompts. Raises ValueError for text that is not valid Unicode.
    """

    text: str | None
    token_ids: Sequence[int] | None
    form: Form | None
    system: str | None
    lora: str | None
    cache_salt: str | None

    def __post_init__(self) -> None:
        for what in ("text", "system", "lora", "cache_salt"):
            if (value := getattr(self, what)) is not None:
                check_text(what, value)


def tokens_of(draft: Draft, tokenizer: PreTrainedTokenizerBase, limit: PromptLimit) -> tuple[Form, Sequence[int]]:
    """Return the kind of prompts that the document is for (plain or chats), and the token ids with which they begin.

    Raises:
        TooManyTokens: The text exceeds *limit*.
        ValueError: A token id is unknown, or the draft cannot have the form or the system message that it asks for.
        TemplateError: The chat template rejects the document (jinja2's error).
    """
    form = draft.form
    if form is None:
        form = Form.CHAT if draft.text is not None and tokenizer.chat_template is not None else Form.TEXT
    if draft.system is not None and form is Form.TEXT:
        raise ValueError('system: only a document with "as": "chat" can have a system message; leave system out')
    if draft.text is None:
        if form is Form.CHAT:
            raise ValueError(
                'as: token ids cannot be a document for chats; replace "token_ids" by "text", or set "as" to "text"'
            )
        limit.check_ids(draft.token_ids or ())
        return form, draft.token_ids or ()
    if form is Form.TEXT:
        limit.check_text(draft.text)
        return form, encode(tokenizer, draft.text)
    if tokenizer.chat_template is None:
        raise ValueError('as: the model\'s tokenizer has no chat template; use "as": "text"')
    return form, chat_prefix(tokenizer, draft.system, draft.text, limit)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return a digest of the tokenizer and its chat template. If it changes, stored token ids are invalid."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(msgspec.json.encode([content, special, tokenizer.chat_template])).digest()
