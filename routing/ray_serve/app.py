"""`build_app`: builds the Ray Serve application for `serve run`, `serve deploy` and `serve.run`."""

from collections.abc import Mapping

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from kvtier.routing.ray_serve.config import ray_serve_config
from kvtier.routing.ray_serve.engine import Engine
from kvtier.routing.ray_serve.front import Front

ENDS_S = 30.0  # time after `drain_s` for a replica to write its cached blocks and end
MAX_AT_ONCE = 256  # requests at one replica that have not ended; the engine has a queue of its own
STATS_S = 2.0  # pause between Ray's queries for a replica's event endpoints, which never change


def build_app(args: Mapping[str, object]) -> Application:
    """Return the Ray Serve application with these arguments, which `RayServeConfig` describes.

    The application has two deployments: `Front` receives HTTP requests and passes them to `Engine`. The argument
    `replicas`, or Ray's own configuration of `Engine`, sets the number of replicas and the resources of each.
    """
    config = ray_serve_config(args)
    routing = RequestRouterConfig(
        request_router_class="kvtier.routing.ray_serve.request_router.PrefixRequestRouter",
        request_router_kwargs={
            "policy": msgspec.to_builtins(config.policy),
            "index": msgspec.to_builtins(config.index),
        },
        request_routing_stats_period_s=STATS_S,
    )
    drain_s = config.engine_config().server.drain_s
    replicas = {
        "max_ongoing_requests": MAX_AT_ONCE,
        "graceful_shutdown_timeout_s": drain_s + ENDS_S,
        "request_router_config": routing,
        **config.replicas,
    }
    fronts = {"max_ongoing_requests": 16 * MAX_AT_ONCE, **config.fronts}
    engine = serve.deployment(Engine, name="Engine", **replicas)
    # Ray restarts all replicas when their arguments change, so the arguments leave out the options of deployments.
    made_of = msgspec.structs.replace(config, replicas={}, fronts={})
    return serve.deployment(Front, name="Front", **fronts).bind(engine.bind(made_of), made_of)
