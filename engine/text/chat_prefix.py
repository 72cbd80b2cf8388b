"""Token ids of chats about a document, and of the prefix that all of these chats share."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from kvtier.engine.text.chat_template import PART_SEPARATOR, chat_text
from kvtier.engine.text.min_tokens import PromptLimit, TooManyTokens
from kvtier.engine.text.template_traits import TemplateTraits

_MAX_BEHIND = 1024  # limit on the tokens after a document, including the question; templates add a handful
_QUESTIONS = ("What", "7")  # two questions that have no token in common


def chat_token_ids(
    tokenizer: PreTrainedTokenizerBase, system: str | None, question: str, limit: PromptLimit
) -> list[int]:
    """Return the token ids of a prompt with a user's *question* and an optional *system* message.

    Raises:
        TooManyTokens: If the prompt certainly has more tokens than the *limit*.
        ValueError, jinja2.exceptions.TemplateError: As raised by `chat_text`.
    """
    traits = TemplateTraits.of(tokenizer, has_tools=False)
    said = [("user", question)] if system is None else [("system", system), ("user", question)]
    text = chat_text(tokenizer, [{"role": role, "content": traits.content(role, text)} for role, text in said])
    limit.check_text(text)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def chat_prefix(tokenizer: PreTrainedTokenizerBase, system: str | None, document: str, limit: PromptLimit) -> list[int]:
    """Return the token ids that begin every conversation whose first user message begins with *document*.

    If *system* is given, each conversation begins with that system message. The returned token ids must not exceed the
    *limit*. Raises the errors of `chat_token_ids`.
    """
    whole = replace(limit, max_tokens=limit.max_tokens + _MAX_BEHIND)
    try:
        first, second = (
            chat_token_ids(tokenizer, system, f"{document}{PART_SEPARATOR}{question}", whole) for question in _QUESTIONS
        )
    except TooManyTokens as error:
        raise TooManyTokens(error.min_num_tokens - _MAX_BEHIND, limit.max_tokens) from None
    num_common = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_common += 1
    return first[:num_common]
