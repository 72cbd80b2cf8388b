"""The server that tests of tools share: its model says what they have written, and else what noise says."""

from collections.abc import Iterator

import pytest
import torch
from scripted_model import Scripted, scripted
from serving import ServerInThread, serving, tables
from tool_templates import QWEN
from tool_texts import SCRIPTS


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
