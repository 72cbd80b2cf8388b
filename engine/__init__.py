"""Everything with an outside: models, scheduler, servers, command line, metrics, files."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.engine.async_llm import AsyncLLM, Piece
    from kvtier.engine.config import Config, ConfigError, load_config
    from kvtier.engine.llm import LLM
    from kvtier.engine.request import Completion, FinishReason
    from kvtier.engine.sampling import SamplingParams
    from kvtier.engine.unsupported_model import UnsupportedModel

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Config",
    "ConfigError",
    "FinishReason",
    "Piece",
    "SamplingParams",
    "UnsupportedModel",
    "load_config",
]

_HOMES = {
    "async_llm": ["AsyncLLM", "Piece"],
    "config": ["Config", "ConfigError", "load_config"],
    "llm": ["LLM"],
    "request": ["Completion", "FinishReason"],
    "sampling": ["SamplingParams"],
    "unsupported_model": ["UnsupportedModel"],
}


def __getattr__(name: str) -> object:
    # On first use: torch and transformers take seconds, which `kvtier --help` need not.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
