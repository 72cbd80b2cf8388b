"""Service: what all requests share: the engine once it is loaded, who may ask, and how much at once."""

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvtier.engine.config import Config
from kvtier.engine.metrics import EngineCollector, HttpMetrics
from kvtier.engine.server.api_error import ApiError
from kvtier.engine.server.api_keys import ApiKeys
from kvtier.engine.server.gate import ConnectionLimits, Gate
from kvtier.engine.server.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from kvtier.engine.async_llm import AsyncLLM  # which is imported while the server answers already
    from kvtier.engine.documents.documents import Documents
    from kvtier.engine.documents.pin_shares import PinShares
    from kvtier.engine.documents.prompt_pins import PromptPins

LOADING_RETRY_S = 5
_TURNS_PER_RUNNING = 2  # as many wait in the engine as run there, so that it can bring ahead what they need
_DRAIN_POLL_S = 0.05


class Service:
    """It goes from loading to ready to draining. Owned by the event loop; *stage* may be set from any thread."""

    def __init__(self, config: Config, model_name: str, keys: ApiKeys | None) -> None:
        scheduler = config.scheduler
        if model_name in config.lora:
            raise ValueError(f"lora {model_name}: the model itself is served by that name; give one of them another")
        self.config = config
        self.settings = config.server
        self.model_name = model_name
        self.keys = keys
        self.created = int(time.time())
        self.stage = "starting"
        self.is_draining = False
        # All that are here may be waiting at once, before the first step or after all were preempted.
        capacity = min(scheduler.max_running + config.server.max_queued, scheduler.max_waiting)
        num_turns = _TURNS_PER_RUNNING * scheduler.max_running
        self.room = WaitingRoom(capacity, num_turns=num_turns, num_tenants=self.num_tenants)
        self.registry = CollectorRegistry()
        self.metrics = HttpMetrics(self.registry)
        self.gate = Gate(
            ConnectionLimits(
                config.server.max_header,
                config.server.header_timeout_s,
                config.server.max_connections,
                config.server.max_connections_per_address,
            ),
            lambda why: self.metrics.connections_refused.labels(why).inc(),
        )
        self._llm: AsyncLLM | None = None
        self._documents: Documents | None = None
        self._pins: PromptPins | None = None
        self._pin_shares: PinShares | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests for completions are taken."""
        return self._llm is not None and not self.is_draining

    @property
    def num_tenants(self) -> int:
        """Who may ask; without API keys that is one, whoever it is."""
        return 1 if self.keys is None else len(self.keys.tenants)

    @property
    def is_strict(self) -> bool:
        """Whether tenants share nothing."""
        return self.keys is not None and self.settings.tenant_isolation == "strict"

    def lora_of(self, model: str) -> str | None:
        """The adapter that a request for *model* is for; None: the model itself. ApiError 404 for any other name."""
        if model == self.model_name:
            return None
        if model in self.config.lora:
            return model
        there = ", ".join([self.model_name, *self.config.lora])
        raise ApiError(
            404, f"there is no model of that name here; there is {there}", code="model_not_found", param="model"
        )

    def loaded(self, llm: "AsyncLLM", documents: "Documents", pins: "PromptPins", shares: "PinShares") -> None:
        """The engine runs: take requests."""
        self._pins = pins
        self._pin_shares = shares
        self._llm = llm
        self._share_out()
        self._documents = documents
        self.registry.register(EngineCollector(llm.statistics))

    def replace_keys(self, keys: ApiKeys) -> None:
        """Let in these from now on. What tenants have that are no more ends with its requests, or its time."""
        self.keys = keys
        self._share_out()

    def _share_out(self) -> None:
        """Let everything that tenants share be divided among as many as there are."""
        self.room.share_among(self.num_tenants)
        if self._llm is not None and self._pin_shares is not None:
            self._llm.tokenizers.share_among(self.num_tenants)
            self._pin_shares.num_tenants = self.num_tenants

    def llm(self) -> "AsyncLLM":
        """The engine. ApiError 503 while it is loading, and when the server is about to end."""
        if self.is_draining:
            raise _shutting_down()
        if self._llm is None:
            headers = {"Retry-After": str(LOADING_RETRY_S)}
            raise ApiError(503, f"the model is being loaded: {self.stage}", code="loading", headers=headers)
        return self._llm

    def documents(self) -> "Documents":
        """All documents. ApiError as for the engine."""
        self.llm()
        assert self._documents is not None, "they are there when the engine is"
        return self._documents

    @property
    def pins(self) -> "PromptPins":
        """The prompts that clients have pinned; the engine's thread's."""
        assert self._pins is not None, "they are there when the engine is"
        return self._pins

    @property
    def longest_request(self) -> int | None:
        """Tokens of a prompt and its continuation; None before the model is loaded."""
        return None if self._llm is None else self._llm.longest_request

    async def drain(self, timeout_s: float) -> int:
        """Take no more requests, send away those that only wait, and wait for those that run; how many are left after
        *timeout_s*."""
        self.is_draining = True
        deadline = time.monotonic() + timeout_s
        while self.room.num_inside and time.monotonic() < deadline:
            await self._send_away_waiting()
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.room.num_inside

    async def _send_away_waiting(self) -> None:
        assert self._llm is not None, "nobody is inside before the engine is there"
        with suppress(RuntimeError):  # it has ended, which tells all streams by itself
            in_engine = await self._llm.ask(lambda core: core.waiting_prompts)
            self.room.send_away_waiting(_shutting_down, in_engine)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is about to end; ask another one", code="shutting_down")
