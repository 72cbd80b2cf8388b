"""Token ids of chats about a document, and of what all of them begin with."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from kvtier.engine.text.chat_template import PART_SEPARATOR, chat_text
from kvtier.engine.text.min_tokens import TooManyTokens
from kvtier.engine.text.prompt_limit import PromptLimit
from kvtier.engine.text.template_traits import TemplateTraits

_MAX_BEHIND = 1024  # tokens that a template may put behind a document, the question among them; in fact a handful
_QUESTIONS = ("What", "7")  # two that share no token


def chat_token_ids(
    tokenizer: PreTrainedTokenizerBase, system: str | None, question: str, limit: PromptLimit
) -> list[int]:
    """Return the token ids of a user's *question*, after a *system* message if there is one, up to the answer.

    Raises:
        TooManyTokens: They are sure to be more than the *limit*.
        ValueError, jinja2.exceptions.TemplateError: What `chat_text` raises.
    """
    traits = TemplateTraits.of(tokenizer, has_tools=False)
    said = [("user", question)] if system is None else [("system", system), ("user", question)]
    text = chat_text(tokenizer, [{"role": role, "content": traits.content(role, text)} for role, text in said])
    limit.check_text(text)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def chat_prefix(tokenizer: PreTrainedTokenizerBase, system: str | None, document: str, limit: PromptLimit) -> list[int]:
    """Return the token ids that all conversations begin with whose first user message begins with *document*.

    A *system* message may come before it. The *limit* is for these token ids. Raises what `chat_token_ids` raises.
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
