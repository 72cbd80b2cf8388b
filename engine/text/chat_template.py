"""chat_text: a conversation as the tokenizer's chat template writes it."""

from collections.abc import Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeAlias

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

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
_END_MARK = "\ue000kvtier end\ue001"  # of characters for private use, which no message has


class LostContent(ValueError):
    """The template leaves the text of a message out of the prompt."""


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
    """Return a conversation as the template writes it.

    Args:
        messages: Their contents are in the form that the template takes, see `TemplateTraits.content`.
        variables: The template's own.
        is_continued: The text ends where the last message's content ends, for the answer to go on with.
        is_asked: Otherwise the text ends with what begins the assistant's next message.

    Raises:
        jinja2.exceptions.TemplateError: The template refuses the messages.
        NotOfTheTemplate: A variable is a parameter of applying the template.
        LostContent: The template leaves out the message that is to be continued.
    """
    for name in variables:
        if name in _NOT_THE_TEMPLATES or name in signature(tokenizer.apply_chat_template).parameters:
            raise NotOfTheTemplate(f"{name}: is no variable of the template's own; leave it out")
    text = tokenizer.apply_chat_template(
        [*map(dict, messages[:-1]), _with_end_mark(messages[-1]) if is_continued else dict(messages[-1])],
        tools=[dict(tool) for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=is_asked and not is_continued,
        **variables,  # checked above: none of them is a parameter
    )
    assert isinstance(text, str)  # which tokenize=False gives
    return _up_to_end_mark(text, _text_of(messages[-1])) if is_continued else text


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message whose content is a text, or a list with one part."""
    content = message["content"]
    return str(content if isinstance(content, str) else content[-1]["text"])


def _with_end_mark(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the message whose text ends in a mark and a blank."""
    marked = f"{_text_of(message)}{_END_MARK} "
    content = marked if isinstance(message["content"], str) else [{"type": "text", "text": marked}]
    return {**message, "content": content}


def _up_to_end_mark(text: str, content: str) -> str:
    """Return what comes before the mark. Blanks at the end of *content* are dropped if the template drops them.

    A template drops blanks if it dropped the one behind the mark. Those before the content are its own and stay.
    """
    before, mark, behind = text.rpartition(_END_MARK)
    if not mark:
        raise LostContent("it leaves out the last message, so that the answer cannot go on with it")
    num_blanks = len(content) - len(content.rstrip()) if content.strip() else 0
    return before[: len(before) - num_blanks] if num_blanks and not behind.startswith(" ") else before
