"""PromptKeeper: keeps the prompts of one request in host memory, as the request asks for it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from kvtier.server.choices import ChoicePiece
from kvtier.server.documents.documents import Documents
from kvtier.server.documents.kept_prefixes import MarkedPrompt
from kvtier.server.prompt import Prompt
from kvtier.server.usage import Usage


class PromptKeeper:
    """Watches the pieces of a request's choices go by, and notes in its *usage* what is kept. Owned by one request."""

    def __init__(
        self, documents: Documents, usage: Usage, tenant: str | None, lora: str | None, cache_salt: str | None
    ) -> None:
        self._documents = documents
        self._usage = usage
        self._tenant = tenant
        self._names = (lora, cache_salt)  # of the prompts' blocks

    async def pinned(
        self, pieces: AsyncIterator[ChoicePiece], prompts: Mapping[int, Sequence[int]], ttl_s: float
    ) -> AsyncIterator[ChoicePiece]:
        """Yield *pieces*; pin each of *prompts* when the choice at its index has ended, before that is told."""
        async for item in pieces:
            if item.piece.completion is not None and item.index in prompts:
                token_ids = prompts[item.index]
                has_room = await self._documents.pin_prompt(self._tenant, token_ids, *self._names, ttl_s)
                self._usage.note_pinned(has_room)
            yield item

    async def kept(self, pieces: AsyncIterator[ChoicePiece], prompt: Prompt) -> AsyncIterator[ChoicePiece]:
        """Yield *pieces*; before the first, when the prompt has been computed, keep it up to its breakpoints."""
        marked = MarkedPrompt(self._tenant, prompt.token_ids, *self._names, prompt.breakpoints)
        # Asked with the request, and not after its first token: what is kept already waits for no step of the engine.
        reading = asyncio.create_task(self._documents.read_prefixes(marked))
        try:
            async for item in pieces:
                if self._usage.kept is None:
                    kept = await reading
                    if len(kept.breakpoints) < len(prompt.breakpoints):
                        kept = await self._documents.keep_prefixes(marked)
                    self._usage.kept = kept
                    self._usage.note_pinned(len(kept.breakpoints) == len(prompt.breakpoints))
                yield item
        finally:
            reading.cancel()
