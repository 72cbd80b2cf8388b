"""AsyncLLM, the asynchronous API: streams tokens to many concurrent callers."""

from __future__ import annotations  # so that help() shows the names of types, not what they stand for

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from kvtier.engine.async_engine import AsyncEngine, StreamChunk
from kvtier.engine.config import Config, as_config
from kvtier.engine.core import EngineStatistics
from kvtier.engine.images.chat_prompt import chat_prompt
from kvtier.engine.llm import GREEDY, Prompt, described
from kvtier.engine.model.sampling import SamplingParams
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, ExtraKeys


class AsyncLLM:
    """An asynchronous `LLM` for many concurrent callers, whose prompts it batches.

    The arguments are those of `LLM`. Loading, tokenizing, and flushing (the writing of cached blocks to disk) never
    block the event loop.

    Example:
        import asyncio
        from kvtier import AsyncLLM

        async def main():
            async with AsyncLLM("smollm2", "laptop") as llm:
                async for chunk in llm.generate("The capital of France is"):
                    print(chunk.text, end="", flush=True)
                print(chunk.tokens)  # the last chunk: where the prompt's tokens came from

        asyncio.run(main())

    To abort a request, leave the `async for` early or cancel its task; the request ends within one step. If `start` or
    `close` is cancelled, the engine is still flushed and closed; await `close` to wait until that is done.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        config: Config | Mapping[str, object] | str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_processor: BaseImageProcessor | None = None,
    ) -> None:
        """Prepare the engine without loading it; `start` loads it."""
        self.config = as_config({} if config is None else config)
        self._model = model
        self._engine = AsyncEngine(model, self.config, tokenizer, image_processor=image_processor)

    async def start(self) -> None:
        """Load the model and start serving. Call it once; it raises the same errors as `LLM`.

        If the calling task is cancelled, the engine is closed as soon as it has loaded.
        """
        await self._engine.start()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
        extra: ExtraKeys | None = None,
        skip_reading_prefix_cache: bool = False,
        max_load_tokens: int | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Stream the continuation of one prompt. Arguments shared with `LLM.generate` have the same meaning.

        A lower *priority* is more urgent.

        Raises:
            ValueError: If the prompt cannot run, the adapter is not loaded, or the queue is full.
        """
        return self._engine.generate(
            prompt,
            sampling,
            lora=lora,
            cache_salt=cache_salt,
            extra=NO_EXTRA_KEYS if extra is None else extra,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
            max_load_tokens=max_load_tokens,
            priority=priority,
        )

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Stream the assistant's answer to a conversation. The arguments are those of `LLM.chat`.

        Raises:
            ValueError: As in `generate`, or if the tokenizer has no chat template or rejects the messages.
        """
        prompt = await self._engine.with_tokenizer(lambda tokenizer: chat_prompt(tokenizer, messages))
        async with aclosing(self.generate(prompt, sampling, lora=lora, cache_salt=cache_salt)) as chunks:
            async for chunk in chunks:
                yield chunk

    def default_sampling(self) -> SamplingParams:
        """Return the sampling parameters that `generate` uses by default, see `LLM.default_sampling`."""
        return self._engine.sampling_defaults.over(GREEDY)

    async def reset_prefix_cache(self) -> bool:
        """Evict all blocks from device, host memory and disk.

        A remote tier keeps its blocks, so later prompts may still hit them.

        Returns:
            True if the blocks were evicted. False if requests are running or copies hang; nothing is evicted then.
        """
        return await self._engine.reset_prefix_cache()

    def statistics(self) -> EngineStatistics:
        """Return the engine's latest statistics, which are at most 0.25 s old while the engine runs steps."""
        return self._engine.statistics()

    async def close(self) -> None:
        """Abort all requests, flush cached blocks to disk, and end the threads. A second call waits for the first.

        Closing continues even if the calling task is cancelled.
        """
        await self._engine.close()

    def __repr__(self) -> str:
        return described("AsyncLLM", self._model, self.config)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncLLM has threads and cannot be pickled or copied; create one in each process")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
