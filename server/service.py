"""Service: the engine, the documents and the waiting room, which all requests share once the model is loaded."""

import asyncio
import time
from contextlib import suppress

from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.config import Config
from kvtier.server.app import shutting_down
from kvtier.server.conversations import Conversations
from kvtier.server.documents.documents import Documents
from kvtier.server.entrance import Entrance
from kvtier.server.served_models import ServedModels
from kvtier.server.tool_calls.tool_use import ToolFormat
from kvtier.server.waiting_room import WaitingRoom

_TURNS_PER_RUNNING = 2  # the engine gets twice as many completions as it can run, to prefetch for the waiting half
_DRAIN_POLL_S = 0.05


class Service:
    """The state that all requests share. It accepts requests until `drain` is called. Owned by the event loop."""

    def __init__(
        self,
        config: Config,
        models: ServedModels,
        entrance: Entrance,
        llm: AsyncEngine,
        documents: Documents,
        tool_format: ToolFormat,
    ) -> None:
        """Create the service of the started engine *llm*. *tool_format* is the format of the model's tool calls."""
        self.settings = config.server
        self.models = models
        self.llm = llm
        self.documents = documents
        self.tool_format = tool_format
        self.operating = entrance.operating
        self.metrics = entrance.metrics
        self.registry = entrance.registry
        self.is_strict = entrance.is_strict
        self.needs_key = entrance.keys is not None
        self.num_tenants = entrance.num_tenants
        self.conversations = Conversations()
        self.is_draining = False
        # At most max_waiting, because all of them may wait in the scheduler at once, such as before the first step.
        capacity = min(config.scheduler.max_running + config.server.max_queued, config.scheduler.max_waiting)
        num_turns = _TURNS_PER_RUNNING * config.scheduler.max_running
        self.room = WaitingRoom(capacity, num_turns=num_turns, num_tenants=self.num_tenants)
        llm.tokenizers.share_among(self.num_tenants)

    def check_open(self) -> None:
        """Raise ApiError 503 if the server is shutting down."""
        if self.is_draining:
            raise shutting_down()

    def share_among(self, num_tenants: int) -> None:
        """Divide the shared resources, such as places in the queue, among *num_tenants* tenants from now on.

        If a tenant no longer has an API key, its running requests and its pins still continue until they end.
        """
        self.num_tenants = num_tenants
        self.room.share_among(num_tenants)
        self.llm.tokenizers.share_among(num_tenants)
        self.documents.share_among(num_tenants)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, reject waiting ones, and wait up to *timeout_s* seconds for running ones.

        Return the number of completions that still run.
        """
        self.is_draining = True
        deadline = time.monotonic() + timeout_s
        while self.room.num_inside and time.monotonic() < deadline:
            await self._send_away_waiting()
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.room.num_inside

    async def _send_away_waiting(self) -> None:
        with suppress(RuntimeError):  # the engine has ended, which ends all streams by itself
            in_engine = await self.llm.ask(lambda core: core.waiting_prompts)
            self.room.reject_waiting(shutting_down, in_engine)
