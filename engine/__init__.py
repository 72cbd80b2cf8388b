"""Everything with an outside: models, scheduler, servers, command line, metrics, files."""

from kvtier.engine.async_llm import AsyncLLM, Piece
from kvtier.engine.config import Config, ConfigError, load_config
from kvtier.engine.llm import LLM
from kvtier.engine.request import Completion, FinishReason
from kvtier.engine.runner import UnsupportedModel
from kvtier.engine.sampling import SamplingParams

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
