"""Token ids of conversations, as the tokenizer's chat template writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeAlias

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from kvtier.engine.text.least_tokens import TooManyTokens
from kvtier.engine.text.prompt_limit import PromptLimit

TemplateValue: TypeAlias = Any  # what JSON has

PART_SEPARATOR = "\n"  # between the parts of one message
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
)  # the others are what filters raise
NO_VARIABLES: Mapping[str, TemplateValue] = MappingProxyType({})
_NOT_THE_TEMPLATES = frozenset({"messages"})  # refused as variables, beside the parameters of `apply_chat_template`
_MOST_BEHIND = 1024  # tokens that a template may put behind a document, the question among them; in fact a handful
_QUESTIONS = ("What", "7")  # two that share no token


class NotOfTheTemplate(ValueError):
    """A variable that is none of the template's own but a parameter of applying it, which callers may not set."""


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, TemplateValue] = NO_VARIABLES,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    is_continued: bool = False,
    is_asked: bool = True,
) -> str:
    """A conversation up to the assistant's next message, or as far as its last message goes if that *is_continued*, or
    if nobody *is_asked* to answer it; *variables* are the template's own.

    jinja2's TemplateError if the template refuses the messages, `NotOfTheTemplate` for a variable that is not the
    template's.
    """
    for name in variables:
        if name in _NOT_THE_TEMPLATES or name in signature(tokenizer.apply_chat_template).parameters:
            raise NotOfTheTemplate(f"{name}: is no variable of the template's own; leave it out")
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=is_asked and not is_continued,
        continue_final_message=is_continued,
        **variables,  # checked above: none of them is a parameter
    )
    assert isinstance(text, str)  # which tokenize=False gives
    return text


def chat_token_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], limit: PromptLimit
) -> list[int]:
    """The token ids of a conversation up to the assistant's next message. Raises what `chat_text` raises, and
    `TooManyTokens` beyond the *limit*."""
    text = chat_text(tokenizer, messages)
    limit.check_text(text)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def chat_prefix(tokenizer: PreTrainedTokenizerBase, system: str | None, document: str, limit: PromptLimit) -> list[int]:
    """The token ids that all conversations begin with whose first user message begins with *document*.

    A *system* message may come before it. The *limit* is for these token ids. Raises what `chat_token_ids` raises.
    """
    whole = replace(limit, most=limit.most + _MOST_BEHIND)
    before = [] if system is None else [{"role": "system", "content": system}]
    try:
        first, second = (
            chat_token_ids(
                tokenizer, [*before, {"role": "user", "content": f"{document}{PART_SEPARATOR}{question}"}], whole
            )
            for question in _QUESTIONS
        )
    except TooManyTokens as error:
        raise TooManyTokens(error.num_least - _MOST_BEHIND, limit.most) from None
    num_common = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_common += 1
    return first[:num_common]
