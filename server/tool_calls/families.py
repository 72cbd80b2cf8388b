"""The model families whose tool calls can be parsed, and the choice of a model's family by its chat template."""

import logging

from transformers import PreTrainedTokenizerBase

from kvtier.engine.config import ToolCallParser
from kvtier.engine.text.template_traits import PROBE, TemplateTraits
from kvtier.server.tool_calls.call_syntax import CallShape, CallSyntax
from kvtier.server.tool_calls.deltas import read_whole
from kvtier.server.tool_calls.free_reader import FreeReader
from kvtier.server.tool_calls.json_block import BareBlock, JsonBlock
from kvtier.server.tool_calls.mistral import ARGS, CALL_ID, MistralBlock

log = logging.getLogger(__name__)

_NAME, _ARGUMENTS, _PARAMETERS = '{"name": "', '", "arguments": ', '", "parameters": '
_TOOL_CALLS = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"


def _listed(name: str, opening: str, closing: str, *markers: str, trailers: tuple[str, ...] = ()) -> CallSyntax:
    """Return the syntax of a model family that writes its tool calls as one JSON list after a marker."""
    shape = CallShape(_NAME, _ARGUMENTS, separator=", ", opening=opening, closing=closing)
    return CallSyntax(name, shape, JsonBlock, markers, trailers, special=(*markers, *trailers))


# The first family that matches is chosen, so families without a marker come last.
_SYNTAXES = (
    CallSyntax(  # Qwen 2.5 and 3, Hermes, SmolLM3, Granite 4
        "hermes",
        CallShape(f"<tool_call>\n{_NAME}", _ARGUMENTS, "}\n</tool_call>"),
        JsonBlock,
        ("<tool_call>",),
        ("</tool_call>",),
        special=("<tool_call>", "</tool_call>"),
    ),
    CallSyntax(
        "mistral_args",  # from its tokenizer's version 11 on
        CallShape(_TOOL_CALLS, ARGS, after="", separator=""),
        MistralBlock,
        (_TOOL_CALLS,),
        special=(_TOOL_CALLS, ARGS, CALL_ID),
    ),
    CallSyntax(
        "mistral",
        CallShape(_NAME, _ARGUMENTS, separator=", ", opening=f"{_TOOL_CALLS}[", closing="]"),
        MistralBlock,
        (_TOOL_CALLS,),
        special=(_TOOL_CALLS, ARGS, CALL_ID),
    ),
    _listed("granite", "<|tool_call|>[", "]", "<|tool_call|>"),  # before version 4
    _listed("jamba", "<tool_calls>[", "]</tool_calls>", "<tool_calls>", trailers=("</tool_calls>",)),
    _listed("phi4_mini_json", "functools[", "]", "functools"),
    CallSyntax(
        "llama3_json",
        CallShape(_NAME, _PARAMETERS, separator="; "),
        BareBlock,
        (_PYTHON_TAG,),
        (";",),
        is_bare=True,
        special=(_PYTHON_TAG,),
    ),
    CallSyntax("json", CallShape(_NAME, _ARGUMENTS), BareBlock, ("```json",), ("```", ";", ","), is_bare=True),
)
_PLAIN = _SYNTAXES[-1]
SYNTAXES: dict[str, CallSyntax] = {syntax.name: syntax for syntax in _SYNTAXES}


def syntax_of(tokenizer: PreTrainedTokenizerBase, asked: ToolCallParser | None) -> CallSyntax:
    """Return the syntax in which a model with this tokenizer writes calls.

    *asked* names the syntax. If it is None, the chat template renders a sample call, and the first family that can
    parse this call is chosen. If no family except plain JSON can, the first family whose marker occurs in the template
    or the vocabulary is chosen. The last resort is plain JSON.
    """
    if asked is not None:
        return SYNTAXES[asked]
    traits = TemplateTraits.of(tokenizer)
    found = next((syntax for syntax in _SYNTAXES if _writes(syntax, traits.call)), None)
    if found is not None and found is not _PLAIN:
        return found
    named = next((syntax for syntax in _SYNTAXES if not syntax.is_bare and _names(tokenizer, syntax)), _PLAIN)
    if traits.writes_tools and found is None:
        log.info("tools: the chat template writes calls in an unknown format; answers are parsed as %s", named.name)
    return named


def _writes(syntax: CallSyntax, call: str | None) -> bool:
    """Return whether *syntax* can parse *call*, a sample call that the chat template has rendered."""
    if call is None or _key(syntax) not in call:
        return False
    return any(each.name == PROBE for each in read_whole(FreeReader(syntax, [PROBE]), call).calls)


def _names(tokenizer: PreTrainedTokenizerBase, syntax: CallSyntax) -> bool:
    """Return whether a marker of *syntax*, such as "<tool_call>", occurs in the chat template or the vocabulary.

    If a special token such as [ARGS] precedes the arguments of a call, that token must occur too.
    """
    template = [] if tokenizer.chat_template is None else [tokenizer.get_chat_template(tools=[{}])]
    known = [*template, *tokenizer.get_added_vocab()]
    key = _key(syntax)
    has_key = key.isalpha() or any(key in text for text in known)
    return has_key and any(marker in text for marker in syntax.markers for text in known)


def _key(syntax: CallSyntax) -> str:
    """Return the key or token that precedes the arguments in a call, such as "parameters" or [ARGS]."""
    return syntax.shape.between.strip('", :')
