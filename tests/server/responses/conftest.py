"""The server that tests of the Responses API share: its model says what they have written for it."""

from collections.abc import Iterator

import pytest
import torch
from scripted_model import Scripted, scripted
from serving import ServerInThread, serving, tables
from tool_templates import QWEN

# In Qwen's form; no two end alike.
SCRIPTS = {
    "text": "It is dry, and it stays so.",
    "call": 'I shall look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "calls": '<tool_call>\n{"name": "search", "arguments": {"depth": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n',
    "custom": '<tool_call>\n{"name": "patch", "arguments": {"input": "+ \\"a\\"\\n- b"}}\n</tool_call>.',
    "nested": '<tool_call>\n{"name": "crew__search", "arguments": {"depth": 3}}\n</tool_call>;',
}


@pytest.fixture(scope="session")
def script() -> Scripted:
    """The model and its scripts."""
    return scripted(SCRIPTS, QWEN)


@pytest.fixture(scope="session")
def tool_server(script: Scripted) -> Iterator[ServerInThread]:
    """Its server."""
    torch.set_num_threads(1)
    with serving(script.model, tables(), tokenizer=script.tokenizer) as address:
        yield address
