"""One server for most tests, and the model's folder for those that start processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving import ServerInThread, chat_tokenizer, serving, tables
from small_models import build


@pytest.fixture(scope="session")
def server() -> Iterator[ServerInThread]:
    """The small Llama, served."""
    torch.set_num_threads(1)  # it is there before what the engine's tests set for each of their modules
    with serving(build("llama"), tables()) as address:
        yield address


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, on disk."""
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    build("llama").save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder
