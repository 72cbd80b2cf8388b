"""For `model.generate` of transformers: `from kvtier.engine.doors.transformers import KVTierCache`."""

from kvtier.engine.doors.transformers_cache.cache import CacheStatistics, KVTierCache
from kvtier.engine.doors.transformers_cache.prompt_cache import PromptCache

__all__ = ["CacheStatistics", "KVTierCache", "PromptCache"]
