"""The server that most tests share, and the folder of its model for tests that start processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_fixtures import model, one_thread
from serving import ServerInThread, chat_tokenizer, serving, tables
from small_models import build

from kvtier.server.generation_request import ignored_parameters, unknown_fields

__all__ = ["model", "model_folder", "nothing_logged_yet", "one_thread", "server"]


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> None:
    """Have names that are logged once per process be logged once per test."""
    unknown_fields.clear()
    ignored_parameters.clear()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerInThread]:
    """A server of the small Llama, in a thread."""
    torch.set_num_threads(1)  # the fixture is made before the engine's tests set it for each module
    with serving(build("llama"), tables()) as address:
        yield address


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    build("llama").save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder
