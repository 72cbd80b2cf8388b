"""Choices: generates the completions of one request concurrently, and yields their pieces as they arrive."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvtier.engine.async_engine import AsyncEngine, StreamChunk
from kvtier.engine.images.image_prompt import PreparedPrompt
from kvtier.engine.images.prompt_images import PromptImages
from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import RequestOptions
from kvtier.engine.scheduling.timeline import Caller

Scores: TypeAlias = Sequence[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """A completion to generate; *index* is its place in the answer."""

    index: int
    prompt: Sequence[int]
    sampling: SamplingParams
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """A piece of text, with its log probabilities, that one engine step added to the choice at *index*."""

    index: int
    piece: StreamChunk


async def generate(
    llm: AsyncEngine,
    choices: Sequence[Sequence[Choice]],
    lora: str | None,
    cache_salt: str | None,
    options: RequestOptions,
    caller: Caller,
) -> AsyncGenerator[ChoicePiece, None]:
    """Generate all *choices*, and yield their pieces until the last choice has ended.

    *choices* has one list for each prompt. The first choice of a list computes the prompt. The other choices of the
    list start after the first choice's first token, so that they hit the prompt's cached blocks. They also get the
    prompt's log probabilities from the first choice.

    With several choices, each has its own request id: the caller's id, a hyphen and the choice's index. Closing the
    iterator ends all choices. If one choice fails, all choices end, and its error is raised.
    """
    pieces: asyncio.Queue[ChoicePiece | BaseException] = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []

    async def follow(choice: Choice, followers: Sequence[Choice], scores: Scores = ()) -> None:
        try:
            stream = llm.generate(
                PreparedPrompt(choice.prompt, choice.images),
                choice.sampling,
                lora=lora,
                cache_salt=cache_salt,
                skip_reading_prefix_cache=not options.reads_cache,
                max_load_tokens=options.max_load_tokens,
                priority=options.priority,
                caller=caller
                if num_choices == 1
                else replace(caller, request_id=f"{caller.request_id}-{choice.index}"),
            )
            async with aclosing(stream):
                async for piece in stream:
                    pieces.put_nowait(ChoicePiece(choice.index, _scored(piece, scores) if scores else piece))
                    of_prompt = piece.prompt_logprobs
                    tasks.extend(asyncio.create_task(follow(follower, (), of_prompt)) for follower in followers)
                    followers = ()
        except BaseException as error:  # the loop below raises the error in the caller's task
            pieces.put_nowait(error)

    num_choices = num_running = sum(len(group) for group in choices)
    tasks += [asyncio.create_task(follow(first, others)) for first, *others in choices]
    try:
        while num_running:
            piece = await pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            num_running -= piece.piece.completion is not None
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _scored(piece: StreamChunk, scores: Scores) -> StreamChunk:
    """Return *piece* with *scores*, the prompt's log probabilities, which another choice has computed."""
    done = None if piece.completion is None else replace(piece.completion, prompt_logprobs=list(scores))
    return replace(piece, completion=done, prompt_logprobs=scores)
