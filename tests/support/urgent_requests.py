"""Requests with options of their own, added to a stepped core."""

from kvtier.engine.core import EngineCore
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import Request, RequestOptions
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS


def add_with(core: EngineCore, prompt: list[int], priority: int, max_tokens: int = 8) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return core.add(prompt, sampling, NO_EXTRA_KEYS, arrived_at=0.0, options=RequestOptions(priority))
