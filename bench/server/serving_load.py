"""A client of OpenAI-compatible servers that measures the time to the first token and the time between tokens."""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httpx

from bench.server.serving_bed import MODEL

TIMEOUT_S = 600.0


@dataclass
class Seen:
    """Times of one streamed answer."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between its tokens
    num_tokens: int = 0


async def ask(client: httpx.AsyncClient, token_ids: Sequence[int], max_tokens: int) -> Seen:
    """Stream one greedy completion. RuntimeError if the server refuses."""
    body = {
        "model": MODEL,
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    seen, began_at = Seen(), time.perf_counter()
    last_at = began_at
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]" or not json.loads(line[6:])["choices"]:
                continue
            now = time.perf_counter()
            if seen.num_tokens:
                seen.gaps_s.append(now - last_at)
            else:
                seen.ttft_s = now - began_at
            seen.num_tokens += 1
            last_at = now
    return seen


async def ask_all(
    url: str, prompts: Iterable[Sequence[int]], max_tokens: int, num_clients: int, until: asyncio.Event | None = None
) -> list[Seen]:
    """Ask all prompts, by *num_clients* that each wait for an answer before the next; answers in order of completion.

    With *until* the clients stop asking once it is set.
    """
    todo, seen = iter(prompts), []

    async def work(client: httpx.AsyncClient) -> None:
        for prompt in todo:
            if until is not None and until.is_set():
                return
            seen.append(await ask(client, prompt, max_tokens))

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        await asyncio.gather(*(work(client) for _ in range(num_clients)))
    return seen


def tokens_per_s(url: str, prompts: Sequence[Sequence[int]], max_tokens: int, num_clients: int) -> float:
    """Tokens of prompts and answers a second, until all are answered."""
    began_at = time.perf_counter()
    asyncio.run(ask_all(url, prompts, max_tokens, num_clients))
    seconds = time.perf_counter() - began_at
    return (sum(map(len, prompts)) + max_tokens * len(prompts)) / seconds
