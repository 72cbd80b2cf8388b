"""ServingApp: answers requests once the model is loaded. It is imported late, because it imports torch."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.config import Config
from kvtier.engine.core import EngineStatistics
from kvtier.engine.observability.memory import memory_statistics
from kvtier.engine.observability.metrics.collector import EngineCollector
from kvtier.engine.text.template_traits import TemplateTraits
from kvtier.server import document_routes, explain_routes, generation, tokenize_routes
from kvtier.server.answers import ServerStatus
from kvtier.server.anthropic.routes import message_routes
from kvtier.server.app import starlette_app
from kvtier.server.documents.document import Document
from kvtier.server.documents.documents import Documents
from kvtier.server.engine_source import EngineSource
from kvtier.server.entrance import Entrance
from kvtier.server.openapi.routes import OpenApiRoutes
from kvtier.server.operated_engine import OperatedEngine
from kvtier.server.responses.routes import ResponseRoutes
from kvtier.server.served_models import ServedModels
from kvtier.server.service import Service
from kvtier.server.tool_calls.tool_use import ToolFormat
from kvtier.tiers.naming.tier import Tier
from kvtier.web.api_error import json_response
from kvtier.web.api_keys import effective_salt
from kvtier.web.dashboard.assets import page_routes
from kvtier.web.dashboard.dashboard import Dashboard
from kvtier.web.dashboard.keeper import history_path, keeper_of
from kvtier.web.dashboard.routes import DashboardRoutes
from kvtier.web.facts import facts_of
from kvtier.web.operating.routes import Operating
from kvtier.web.paths import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EXPLAIN,
    OPERATE,
    READY,
    STATS,
    TOKENIZE,
)

log = logging.getLogger(__name__)

_TELL_EVERY_S = 2.0
_STAT = Path("/proc/self/stat")
_STARTED_FIELD = 22  # number of the field with the start time in clock ticks since boot, counted from 1 as in proc(5)
_IMPORTED_AT = time.monotonic()


class ServingApp:
    """The ASGI app that answers requests with a `Service`, and shuts the service down. Owned by the event loop."""

    def __init__(self, service: Service, dashboard: Dashboard) -> None:
        self.service = service
        self._dashboard = dashboard
        self._sampling = asyncio.create_task(dashboard.run())
        routes = [
            Route(COMPLETIONS, generation.complete, methods=["POST"]),
            Route(CHAT, generation.chat, methods=["POST"]),
            *ResponseRoutes(service).routes(),
            *message_routes(),
            Route(TOKENIZE, tokenize_routes.tokenize, methods=["POST"]),
            Route(DETOKENIZE, tokenize_routes.detokenize, methods=["POST"]),
            *document_routes.routes(),
            Route(EXPLAIN, explain_routes.explain_prompt, methods=["POST"]),
            Route(f"{EXPLAIN}/{{id:path}}", explain_routes.explain_request, methods=["GET"]),
            *service.models.routes(),
            Route(READY, self._ready),
            Route(STATS, self._stats),
            *OpenApiRoutes(service.needs_key, service.is_strict).routes(),
            *page_routes(),
            *DashboardRoutes(dashboard, lambda request: facts_of(request.scope).tenant).routes(),
        ]
        if service.operating is not None:
            self._operated = OperatedEngine(service)
            routes.append(Route(f"{OPERATE}/{{verb}}", partial(self._operate, service.operating), methods=["POST"]))
        self._app = starlette_app(routes, service.registry)
        self._app.state.service = service

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """All routes of the app."""
        return self._app.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def share_among(self, num_tenants: int) -> None:
        """Divide the shared resources, such as places in the queue, among *num_tenants* tenants from now on."""
        self.service.share_among(num_tenants)

    def end(self) -> None:
        """Refuse requests from now on."""
        self.service.is_draining = True

    async def wait_end(self) -> None:
        """Wait until the engine has ended, and raise the error that ended it, if any.

        Meanwhile, log how much of the host tier's memory is prepared.
        """
        watching = asyncio.create_task(self._watch_memory())
        try:
            await self.service.llm.wait_end()
        finally:
            watching.cancel()

    async def close(self) -> None:
        """Allow running requests to continue for up to `server.drain_s` seconds, flush the cache, and end the engine.

        Viewers of the dashboard stay connected until the running requests have ended or are cut off.
        """
        told_at = time.monotonic()

        def tell(num_blocks: int) -> None:
            nonlocal told_at
            if time.monotonic() - told_at > _TELL_EVERY_S:
                told_at = time.monotonic()
                log.info("flush: %d blocks are still to be written", num_blocks)

        try:
            if num_left := await self._drained():
                log.warning("drain: %d completions did not end in time and are cut off", num_left)
            await self.service.documents.close()
            self._dashboard.end()
            await self._sampling
        finally:
            self._dashboard.end()
            await self.service.llm.close(tell)
        log.info("ended")

    async def _drained(self) -> int:
        drain_s = self.service.settings.drain_s
        if num_running := self.service.room.num_inside:
            log.info("drain: %d completions may continue for %g s", num_running, drain_s)
        return await self.service.drain(drain_s)

    async def _watch_memory(self) -> None:
        """Log how much of the host tier's memory is prepared, until all of it is.

        Memory is prepared when it is allocated and, with CUDA, page-locked. This can take longer than loading the
        model. With a sidecar, nothing is logged, because the sidecar may come and go while the server runs.
        """
        with contextlib.suppress(RuntimeError):  # the engine has ended
            told = 0
            while (host := (statistics := self.service.llm.statistics()).cache.tiers.get(Tier.HOST)) is not None:
                if statistics.sidecar is not None:
                    return
                prepared = statistics.host_prepared_bytes
                if prepared != told:
                    told = prepared
                    log.info("host memory: %d of %d MiB are ready for use", prepared >> 20, host.capacity_bytes >> 20)
                if prepared >= host.capacity_bytes:
                    return
                await asyncio.sleep(_TELL_EVERY_S)

    async def _stats(self, _: Request) -> Response:
        process = {"http": asdict(self.service.metrics.statistics()), "memory": asdict(memory_statistics())}
        return json_response(stats_view(self.service.llm.statistics()) | process)

    async def _operate(self, operating: Operating, request: Request) -> Response:
        self.service.check_open()
        return await operating.answer(request, self._operated)

    async def _ready(self, _: Request) -> Response:
        if self.service.is_draining:
            return json_response(ServerStatus("draining"), 503)
        return json_response(ServerStatus("ready"))


async def load_app(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: Config,
    models: ServedModels,
    entrance: Entrance,
    set_stage: Callable[[str], None],
) -> ServingApp:
    """Load the model, restore the stored documents, and return the app that serves requests.

    Raises the errors of `AsyncEngine.start` and `Documents.open`. If the caller is cancelled, the engine's thread
    finishes loading before it ends.
    """
    llm = AsyncEngine(model, config, tokenizer, set_stage)
    await llm.start()
    set_stage("reading documents")
    is_strict = entrance.is_strict

    def salt_of(document: Document) -> str | None:
        return effective_salt(document.tenant, document.cache_salt, is_strict)

    try:
        tool_format = await llm.with_tokenizer(partial(ToolFormat.of, asked=config.server.tool_call_parser))
        traits = await llm.with_tokenizer(partial(TemplateTraits.of, has_tools=False))
        for role in sorted(traits.lost_roles):
            log.warning("chat template: drops messages with the role %s, so the model does not see them", role)
        documents = await Documents.open(llm, config, salt_of, entrance.num_tenants)
    except BaseException:
        await llm.close()
        raise
    entrance.registry.register(EngineCollector(llm.statistics, config.metrics.compat, models.name))
    fields = {"seconds": round(process_age_s(), 1), "max_model_len": llm.longest_request}
    log.info("ready", extra={"fields": fields})
    models = replace(models, longest_request=llm.longest_request)
    service = Service(config, models, entrance, llm, documents, tool_format)
    source = EngineSource(service)
    keeper = keeper_of(source.columns, history_path(config.dashboard, config.disk))
    return ServingApp(service, Dashboard(source, keeper, config.dashboard.max_viewers))


def process_age_s(stat: Path = _STAT) -> float:
    """Return the age of the process in seconds. If *stat* cannot be read, count from the import of this module."""
    try:
        # Split only the fields from the third on, because the second field, the process's name, may contain spaces.
        fields = stat.read_text().rpartition(")")[2].split()
        started_s = int(fields[_STARTED_FIELD - 3]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_AT


def stats_view(statistics: EngineStatistics) -> dict[str, object]:
    """Return the statistics as a JSON object. Bytes per tenant are listed only for tenants with a quota."""
    cache = replace(statistics.cache, host_tenants={})
    if cache.disk is not None:
        cache = replace(cache, disk=replace(cache.disk, tenants={}))
    what_if = {
        tier.value: {f"{size:g}": hits for size, hits in each.items()}
        for tier, each in statistics.requests.what_if.items()
    }
    requests = replace(statistics.requests, what_if={})  # its keys are not strings
    view: dict[str, object] = msgspec.to_builtins(replace(statistics, cache=cache, requests=requests), enc_hook=_plain)
    return {**view, "what_if": what_if}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"statistics: a {type(value).__name__} cannot be written as JSON")
