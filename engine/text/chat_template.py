"""Token ids of conversations, as the tokenizer's chat template writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from kvtier.engine.text.least_tokens import TooManyTokens
from kvtier.engine.text.prompt_limit import PromptLimit

TemplateValue: TypeAlias = Any  # what JSON has

PART_SEPARATOR = "\n"  # between the parts of one message
NO_VARIABLES: Mapping[str, TemplateValue] = MappingProxyType({})
_NOT_THE_TEMPLATES = frozenset({"messages"})  # refused as variables, beside the parameters of `apply_chat_template`
_MOST_BEHIND = 1024  # tokens that a template may put behind a document, the question among them; in fact a handful
_QUESTIONS = ("What", "7")  # two that share no token


class NotOfTheTemplate(ValueError):
    """A variable that is none of the template's own but a parameter of applying it, which callers may not set."""


def chat_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    limit: PromptLimit,
    variables: Mapping[str, TemplateValue] = NO_VARIABLES,
) -> list[int]:
    """The token ids of a conversation up to the assistant's next message; *variables* are the template's own.

    jinja2's TemplateError if the template refuses the messages, `NotOfTheTemplate` for a variable that is not the
    template's, `TooManyTokens` beyond the *limit*.
    """
    for name in variables:
        if name in _NOT_THE_TEMPLATES or name in signature(tokenizer.apply_chat_template).parameters:
            raise NotOfTheTemplate(f"{name}: is no variable of the template's own; leave it out")
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        **variables,  # checked above: none of them is a parameter
    )
    assert isinstance(text, str)  # which tokenize=False gives
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
