"""Stories that are played with an AsyncEngine."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

from small_models import VOCAB, byte_tokenizer
from transformers import PreTrainedModel

from kvtier import Completion, SamplingParams, StreamChunk
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.core import EngineCore

BLOCK_SIZE = 16


BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model


NUM_SLOTS = 200


DEADLINE_S = 180.0  # of a story that takes a second: reached only when a test fails


def opened(
    model: PreTrainedModel,
    folder: Path | None = None,
    make: Callable[..., AsyncEngine] = AsyncEngine,
    **scheduler: int,
) -> AsyncEngine:
    tables: dict[str, object] = {
        "device": {"capacity": NUM_SLOTS * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": NUM_SLOTS * BLOCK_BYTES},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always", **scheduler},
    }
    if folder is not None:
        tables["disk"] = {"path": str(folder / "store"), "capacity": "64MiB"}
    return make(model, tables, byte_tokenizer())


def play(story: Coroutine[object, object, None]) -> None:
    """Run a test's story on an event loop of its own."""
    asyncio.run(asyncio.wait_for(story, DEADLINE_S))


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def greedy(max_tokens: int = 8, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


async def read(stream: AsyncIterator[StreamChunk]) -> list[StreamChunk]:
    return [piece async for piece in stream]


def completion_of(pieces: list[StreamChunk]) -> Completion:
    assert all(piece.completion is None for piece in pieces[:-1])
    assert pieces[-1].completion is not None
    return pieces[-1].completion


def is_at_rest(core: EngineCore) -> bool:
    """No request is left, and nobody leases a slot."""
    return not core.has_work and core.cache.free_slots() == [NUM_SLOTS] * len(core.cache.groups)
