"""Fixtures of tests that run models: their conftest imports them."""

from collections.abc import Iterator

import pytest
import torch
from small_models import build
from transformers import PreTrainedModel


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because on busy cores the threads of small operations wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The small Llama."""
    return build("llama")
