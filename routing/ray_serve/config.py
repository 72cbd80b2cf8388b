"""The configuration of an application of Ray Serve: one frozen tree, which the whole application is built of."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvtier.engine.config import (
    Config,
    ConfigError,
    ServerConfig,
    Table,
    config_from_dict,
    load_toml,
    tree_from_dict,
    with_tables,
)
from kvtier.routing.config import IndexConfig, PolicyConfig, TokensConfig
from kvtier.sidecar.config import sidecar_config

ANY_ADDRESS = "0.0.0.0"  # says what Ray's proxies may do; nothing listens there


class RayServeConfig(Table, frozen=True, kw_only=True):
    """What `build_app` gets. *config* is a file of `kvtier serve`'s configuration, *engine* are tables in place of its
    own. *sidecar* are tables of the sidecar that each node has one of; without it replicas share nothing. The others
    are those of `kvtier route`.

    *replicas* and *fronts* are options of Ray's deployments `Engine` and `Front`: `num_replicas`, `autoscaling_config`,
    `ray_actor_options` and so on.
    """

    model: Annotated[str, msgspec.Meta(min_length=1)]
    config: str | None = None
    engine: dict[str, Any] = msgspec.field(default_factory=dict)
    sidecar: dict[str, Any] | None = None
    policy: PolicyConfig = PolicyConfig()
    index: IndexConfig = IndexConfig()
    tokens: TokensConfig = TokensConfig()
    replicas: dict[str, Any] = msgspec.field(default_factory=dict)
    fronts: dict[str, Any] = msgspec.field(default_factory=dict)

    def engine_config(self, **tables: object) -> Config:
        """The configuration of a replica's engine, with these *tables* too. `ConfigError`."""
        return config_from_dict({**self.engine_tables(), **tables}, "engine")

    def engine_tables(self) -> Mapping[str, object]:
        """What is given of it."""
        return with_tables({} if self.config is None else load_toml(self.config), self.engine)


def ray_serve_config(args: Mapping[str, object]) -> RayServeConfig:
    """The configuration in the arguments of an application. `ConfigError` for a mistake, in the engine's or the
    sidecar's tables too."""
    config: RayServeConfig = tree_from_dict(RayServeConfig, args, "ray")
    for key in _WHY_NOT.keys() & config.engine_tables().keys():
        raise ConfigError(f"engine: $.{key}: {_WHY_NOT[key]}")
    config.engine_config()
    if config.sidecar is not None:
        sidecar_config(None, config.sidecar)
        config.engine_config(sidecar="unix:///tmp/kvtier.sock")  # refuses what the sidecar has in its place
    return config


def server_settings(config: Config) -> ServerConfig:
    """Return the settings of the server in an engine's configuration, as an application of Ray Serve has them.

    Ray's proxies listen, on addresses that are not known here, so hosts are judged as on a network.
    """
    return msgspec.structs.replace(config.server, host=ANY_ADDRESS)


_WHY_NOT = {
    "events": "each replica publishes its own, at a free port; leave the table out",
    "sidecar": "is started by the application; give its tables as sidecar",
    "documents": "are kept by one server, and replicas come and go; leave the table out",
    "disk": "replicas of a node cannot share a folder; give it as sidecar.disk",
}
