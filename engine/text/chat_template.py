"""Rendering of conversations by the tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeAlias

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

TemplateValue: TypeAlias = Any  # any JSON value

PART_SEPARATOR = "\n"  # between the parts of one message
# Errors of rendering a template, including those that its filters raise.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError)
NO_VARIABLES: Mapping[str, TemplateValue] = MappingProxyType({})
_NOT_THE_TEMPLATES = frozenset({"messages"})  # reserved names, in addition to the parameters of `apply_chat_template`
_END_MARK = "\ue000kvtier end\ue001"  # private-use characters, which no message contains


class LostContent(ValueError):
    """Raised if the chat template leaves the text of a message out of the prompt."""


class ReservedVariable(ValueError):
    """Raised for a template variable with a reserved name, such as a parameter of `apply_chat_template`."""


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, TemplateValue] = NO_VARIABLES,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    is_continued: bool = False,
    is_asked: bool = True,
) -> str:
    """Return a conversation as rendered by the chat template.

    Args:
        tokenizer: Tokenizer with the template.
        messages: Messages whose contents have the form that the template expects, see `TemplateTraits.content`.
        variables: Additional variables for the template, by name.
        tools: Tools that the assistant may call.
        is_continued: Whether the text ends with the last message's content, so that the answer continues it.
        is_asked: Whether the text ends with the start of the assistant's next message. Ignored if *is_continued*.

    Raises:
        jinja2.exceptions.TemplateError: If the template rejects the messages.
        ReservedVariable: If a variable has a reserved name.
        LostContent: If the template leaves out the message that is to be continued.
    """
    for name in variables:
        if name in _NOT_THE_TEMPLATES or name in signature(tokenizer.apply_chat_template).parameters:
            raise ReservedVariable(f"the name of the template variable {name} is reserved; leave the variable out")
    text = tokenizer.apply_chat_template(
        [*map(dict, messages[:-1]), _with_end_mark(messages[-1]) if is_continued else dict(messages[-1])],
        tools=[dict(tool) for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=is_asked and not is_continued,
        **variables,  # none of them is a parameter, see the check above
    )
    assert isinstance(text, str)  # because of tokenize=False
    return _up_to_end_mark(text, _text_of(messages[-1])) if is_continued else text


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message whose content is a string or a list with one part."""
    content = message["content"]
    return str(content if isinstance(content, str) else content[-1]["text"])


def _with_end_mark(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the message with `_END_MARK` and a space after its text."""
    marked = f"{_text_of(message)}{_END_MARK} "
    content = marked if isinstance(message["content"], str) else [{"type": "text", "text": marked}]
    return {**message, "content": content}


def _up_to_end_mark(text: str, content: str) -> str:
    """Return the rendered *text* before `_END_MARK`, which `_with_end_mark` put behind the last message's *content*.

    If the template strips a message's trailing spaces, those at the end of *content* are removed here. The template
    could not strip them, because the mark follows them.
    """
    before, mark, behind = text.rpartition(_END_MARK)
    if not mark:
        raise LostContent("the prompt would lack the last message, so the answer cannot continue that message")
    num_blanks = len(content) - len(content.rstrip()) if content.strip() else 0
    # A template that strips trailing spaces has removed the space behind the mark.
    return before[: len(before) - num_blanks] if num_blanks and not behind.startswith(" ") else before
