"""ToolUse: what one request may call, and how its answers are read; ToolFormat: how the served model writes calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from transformers import PreTrainedTokenizerBase

from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.server.tool_calls.call_syntax import CallSyntax
from kvtier.engine.server.tool_calls.deltas import Reader, TextReader
from kvtier.engine.server.tool_calls.families import syntax_of
from kvtier.engine.server.tool_calls.free_reader import FreeReader
from kvtier.engine.server.tool_calls.tool import Tool, ToolChoice
from kvtier.engine.tool_call_parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the served model writes calls, and the special tokens that it writes them with."""

    syntax: CallSyntax
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, asked: ToolCallParser | None) -> Self:
        """That of a model with this tokenizer, or the one *asked* for."""
        syntax = syntax_of(tokenizer, asked)
        added = tokenizer.get_added_vocab()
        return cls(syntax, tuple(added[text] for text in syntax.special if text in added))


class ToolUse:
    """The tools of one request. Each choice of its answer has a reader of its own."""

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool, form: ToolFormat) -> None:
        self._names = frozenset(tool.function.name for tool in tools)
        self._is_parallel = is_parallel
        self._form = form
        self._is_used = bool(tools) and choice != "none"

    def reader(self) -> Reader:
        """A reader of an answer that begins."""
        return (
            FreeReader(self._form.syntax, self._names, is_parallel=self._is_parallel) if self._is_used else TextReader()
        )

    def shown(self, sampling: SamplingParams) -> SamplingParams:
        """*sampling* with the tokens in the text that calls are written with."""
        return replace(sampling, shown_token_ids=self._form.token_ids) if self._is_used else sampling
