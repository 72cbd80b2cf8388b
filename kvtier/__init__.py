"""A tiered KV cache for LLM inference: the public names that most programs need, each imported on first use.

The packages (`cli`, `connectors`, `engine`, `server`, `store`, `tiers` and others) are folders at the top of the
repository. This folder holds links to them, so that editors, type checkers and a fresh clone find `kvtier.*`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.connectors.transformers import KVTierCache
    from kvtier.engine.async_engine import StreamChunk
    from kvtier.engine.async_llm import AsyncLLM
    from kvtier.engine.config import Config, ConfigError, load_config
    from kvtier.engine.images.image_prompt import ImagePrompt
    from kvtier.engine.llm import LLM
    from kvtier.engine.model.errors import UnsupportedModel
    from kvtier.engine.model.sampling import SamplingParams
    from kvtier.engine.model.structured.structured_outputs import StructuredOutputs
    from kvtier.engine.scheduling.request import Completion, FinishReason, RequestOptions

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Config",
    "ConfigError",
    "FinishReason",
    "ImagePrompt",
    "KVTierCache",
    "RequestOptions",
    "SamplingParams",
    "StreamChunk",
    "StructuredOutputs",
    "UnsupportedModel",
    "__version__",
    "load_config",
]

_HOMES = {
    "engine.async_engine": ["StreamChunk"],
    "engine.async_llm": ["AsyncLLM"],
    "engine.config": ["Config", "ConfigError", "load_config"],
    "connectors.transformers": ["KVTierCache"],
    "engine.images.image_prompt": ["ImagePrompt"],
    "engine.llm": ["LLM"],
    "engine.model.sampling": ["SamplingParams"],
    "engine.model.structured.structured_outputs": ["StructuredOutputs"],
    "engine.model.errors": ["UnsupportedModel"],
    "engine.scheduling.request": ["Completion", "FinishReason", "RequestOptions"],
}


def __getattr__(name: str) -> object:
    # Import on first use: torch and transformers take seconds, and `import kvtier` and `kvtier --help` need neither.
    if name == "__version__":
        from importlib.metadata import version

        return version("kvtier")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
