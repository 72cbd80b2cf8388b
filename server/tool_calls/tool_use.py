"""ToolUse: the tools of one request, with parsers of its answers. ToolFormat: the served model's call format."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from kvtier.engine.config import ToolCallParser
from kvtier.engine.model.sampling import InvalidParameter, SamplingParams
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs
from kvtier.server.tool_calls.call_grammar import CallGrammar
from kvtier.server.tool_calls.call_syntax import CallSyntax
from kvtier.server.tool_calls.deltas import Reader, TextReader
from kvtier.server.tool_calls.families import syntax_of
from kvtier.server.tool_calls.free_reader import FreeReader
from kvtier.server.tool_calls.shaped_reader import ShapedReader
from kvtier.server.tool_calls.tool import AllowedTools, NamedTool, Tool, ToolChoice, chosen_names


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of the served model's calls. *special* maps the text of each special token in calls to its id."""

    syntax: CallSyntax
    special: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, asked: ToolCallParser | None) -> Self:
        """Return the format of a model with this tokenizer. *asked* names it; if None, the chat template decides."""
        syntax = syntax_of(tokenizer, asked)
        tokens = tokenizer.added_tokens_decoder.items()
        special = {token.content: token_id for token_id, token in tokens if token.special}
        return cls(syntax, {text: special[text] for text in syntax.special if text in special})


class ToolUse:
    """The tools of one request: the grammar that answers must follow, and readers that find calls in answers.

    A grammar enforces the exact format of calls if a call is required, if a tool is strict, or if the request asks for
    JSON. An enforced call is streamed while it is written, unless other text of the answer could look like a call.
    All other calls are sent once they are complete.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        is_parallel: bool,
        form: ToolFormat,
        answer: StructuredOutputs | None,
    ) -> None:
        """Prepare the tools. *answer* is the required format of an answer without calls, or None for any text."""
        self._form = form
        self._answer = answer
        self._is_used = bool(tools) and choice != "none"
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        self._is_forced = self._is_used and mode != "auto"
        chosen = chosen_names(choice)
        self._functions = [tool.function for tool in tools if chosen is None or tool.function.name in chosen]
        self._is_parallel = is_parallel and not isinstance(choice, NamedTool)
        self._is_strict = any(function.strict for function in self._functions)

    def reader(self) -> Reader:
        """Return a reader for one answer. Each choice of the request needs a reader of its own."""
        syntax = self._form.syntax
        if not self._is_used:
            return TextReader()
        is_free = syntax.is_bare or self._answer is not None  # then an answer's text may look like a call
        if self._is_forced:
            return ShapedReader(syntax.shape)
        if self._is_strict and not is_free:
            return ShapedReader(syntax.shape, syntax.markers[0])
        return FreeReader(syntax, {function.name for function in self._functions}, is_parallel=self._is_parallel)

    def shown(self, sampling: SamplingParams) -> SamplingParams:
        """Return *sampling*, changed so that decoding keeps the special tokens of calls in the text."""
        return replace(sampling, shown_token_ids=tuple(self._form.special.values())) if self._is_used else sampling

    @property
    def structured(self) -> StructuredOutputs | None:
        """The grammar or other format that the whole answer must follow, calls included, or None for any text.

        Raises `InvalidParameter` if the answer format of the request cannot be combined with calls.
        """
        answer = self._answer
        if not self._is_used or (not self._is_forced and answer is None and not self._is_strict):
            return answer
        syntax = self._form.syntax
        grammar = CallGrammar(syntax.shape, self._functions, self._form.special, is_parallel=self._is_parallel)
        if self._is_forced:
            text = grammar.forced()
        elif answer is not None:
            text = grammar.or_json(self._schema(answer), strict=answer.strict)
        else:
            text = grammar.free_except_json() if syntax.is_bare else grammar.free(syntax.markers[0])
        return StructuredOutputs(grammar=text, parameter_name="tools")

    def _schema(self, answer: StructuredOutputs) -> Mapping[str, Any]:
        if answer.kind not in ("json", "json_object") or self._form.syntax.is_bare:
            advice = 'cannot be combined with optional tool calls; set tool_choice to "none" or "required"'
            raise InvalidParameter(answer.parameter_name, advice)
        schema: dict[str, Any] = json.loads(answer.text)
        return schema
