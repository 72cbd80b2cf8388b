"""The cache for transformers' `model.generate`: `from kvtier.connectors.transformers import KVTierCache`."""

from kvtier.connectors.transformers_cache.cache import CacheStatistics, KVTierCache
from kvtier.connectors.transformers_cache.prompt_cache import PromptCache

__all__ = ["CacheStatistics", "KVTierCache", "PromptCache"]
