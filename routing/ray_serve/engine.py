"""`Engine`: the Ray deployment of a replica, with `AsyncLLM` and the routes of `kvtier serve`."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping

import ray
from ray import serve
from starlette.types import ASGIApp, Message, Scope

from kvtier.engine.core import EngineCore
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.routing.ray_serve.config import RayServeConfig, server_settings
from kvtier.routing.ray_serve.node_sidecar import sidecar_of_node
from kvtier.routing.ray_serve.received_request import ReceivedRequest, Way
from kvtier.routing.ray_serve.request_router import EVENTS, REPLAY
from kvtier.server.access import Access, KeyCheck
from kvtier.server.entrance import Entrance
from kvtier.server.http_server import with_cors
from kvtier.server.served_models import ServedModels
from kvtier.server.serving_app import load_app
from kvtier.web.api_keys import ApiKeys, with_tenant_names

REPLICA_HEADER = b"x-kvtier-replica"
_ANY_PORT = "tcp://*:0"


async def messages(app: ASGIApp, call: ReceivedRequest) -> AsyncGenerator[Message]:
    """Pass the request *call* to *app*, and yield each ASGI message as soon as *app* sends it.

    If the generator is closed before the end, *app* is cancelled, as if the client had disconnected.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()  # bounded by the length of the model's answer
    to_receive: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if to_receive:
            return to_receive.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable: the event is never set")

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def work() -> None:
        try:
            await app(_scope(call), receive, send)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(work())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()


def _scope(call: ReceivedRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": list(call.headers),
        "client": call.client,
        "server": None,
        "state": {},
    }


class Engine:
    """A replica: one engine, which publishes KV events and uses its node's sidecar if the application has sidecars.

    Ray Serve creates the object, calls it on one event loop, and calls `__del__` before it ends the process.
    """

    async def __init__(self, config: RayServeConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load the model. Raises the same errors as `LLM`."""
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id.encode()
        tables: dict[str, object] = {
            "events": {"endpoint": _ANY_PORT, "replay_endpoint": _ANY_PORT, "host": ray.util.get_node_ip_address()}
        }
        if config.sidecar is not None:
            tables["sidecar"] = f"unix://{await sidecar_of_node(context.app_name, config.sidecar)}"
        loaded = config.engine_config(**tables)
        keys = ApiKeys.of(loaded.server.api_keys)
        self._entrance = Entrance(server_settings(loaded), keys, tracer=Tracer.of(loaded.tracing, "kvtier"))
        name = loaded.server.model_name or Checkpoint.of(config.model).served_name
        models = ServedModels(name, tuple(loaded.lora), int(time.time()), longest_request=None)
        named = with_tenant_names(loaded, keys)
        self._serving = await load_app(config.model, None, named, models, self._entrance, lambda stage: None)
        checked = with_cors(KeyCheck(self._serving, self._entrance), loaded.server)
        self._app: ASGIApp = Access(checked, self._entrance)
        self._publishes = await self._serving.service.llm.ask(_publishes)

    def record_routing_stats(self) -> Mapping[str, object]:
        """Return the endpoints where this replica publishes KV events. Ray passes them on to the request routers."""
        return self._publishes

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has ended, so that Ray starts another replica."""
        self._serving.service.llm.statistics()

    async def answer(self, call: ReceivedRequest, way: Way) -> AsyncGenerator[Message]:
        """Yield the answer to a request as ASGI messages.

        *way* has the data for routing the call. It is not used here. It is an argument because Ray's request router
        sees only the arguments of a call.
        """
        async for message in messages(self._app, call):
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (REPLICA_HEADER, self._name)]}  # noqa: PLW2901
            yield message

    async def __del__(self) -> None:
        """Wait for running requests, flush the cache, and end the engine."""
        if (serving := getattr(self, "_serving", None)) is not None:
            await serving.close()
            self._entrance.close()


def _publishes(core: EngineCore) -> Mapping[str, object]:
    assert core.publisher is not None, "no [events]"
    return {EVENTS: core.publisher.endpoint, REPLAY: core.publisher.replay_endpoint}
