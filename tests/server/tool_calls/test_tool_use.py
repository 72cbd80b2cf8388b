"""How an answer is read hangs on what the request leaves to the model."""

import json

import pytest
from tool_texts import TOOLS

from kvtier.engine.model.structured.structured_outputs import StructuredOutputs
from kvtier.server.tool_calls.deltas import read_whole
from kvtier.server.tool_calls.families import SYNTAXES
from kvtier.server.tool_calls.tool import Tool
from kvtier.server.tool_calls.tool_use import ToolFormat, ToolUse
from kvtier.web.request_body import fit

STRICT = [fit({"function": {**tool["function"], "strict": True}}, Tool) for tool in TOOLS]
JSON = StructuredOutputs(json_object=True)


@pytest.mark.parametrize("family", SYNTAXES)
def test_a_call_within_the_json_of_an_answer_is_none(family: str) -> None:
    for quoted in ("[TOOL_CALLS]search[ARGS]so", '<tool_call>\n{"name": "search", "arguments": so', "<|tool_call|>[{"):
        text = json.dumps({"answer": quoted})
        use = ToolUse(STRICT, "auto", True, ToolFormat(SYNTAXES[family], {}), JSON)

        read = read_whole(use.reader(), text)

        assert (read.text, read.calls) == (text, [])
