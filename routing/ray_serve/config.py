"""The configuration of a Ray Serve application: one frozen tree, from which the whole application is built."""

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
    merge_tables,
    tree_from_dict,
)
from kvtier.routing.config import IndexConfig, PolicyConfig, TokensConfig
from kvtier.sidecar.config import sidecar_config

ANY_ADDRESS = "0.0.0.0"  # selects the rules for a server on a network; no socket listens at this address


class RayServeConfig(Table, frozen=True, kw_only=True):
    """The arguments of `build_app`.

    *config* is the path of a configuration file of `kvtier serve`, and *engine* has tables that override the file.
    *sidecar* has the tables of each node's sidecar; without it, there is no sidecar, and replicas share no blocks.
    *policy*, *index* and *tokens* are tables of `kvtier route`.

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
        """Return the configuration of a replica's engine, with additional *tables*. Raise `ConfigError` if invalid."""
        return config_from_dict({**self.engine_tables(), **tables}, "engine")

    def engine_tables(self) -> Mapping[str, object]:
        """Return the tables of the engine's configuration that the arguments give."""
        return merge_tables({} if self.config is None else load_toml(self.config), self.engine)


def ray_serve_config(args: Mapping[str, object]) -> RayServeConfig:
    """Return the configuration in the arguments of an application.

    Raises:
        ConfigError: If the arguments, including the engine's and the sidecar's tables, are invalid.
    """
    config: RayServeConfig = tree_from_dict(RayServeConfig, args, "ray")
    for key in _WHY_NOT.keys() & config.engine_tables().keys():
        raise ConfigError(f"engine: $.{key}: {_WHY_NOT[key]}")
    config.engine_config()
    if config.sidecar is not None:
        sidecar_config(None, config.sidecar)
        config.engine_config(sidecar="unix:///tmp/kvtier.sock")  # refuses tables that belong to the sidecar
    return config


def server_settings(config: Config) -> ServerConfig:
    """Return the server settings in an engine's configuration, adapted to a Ray Serve application.

    The addresses of Ray's proxies are not known here, so a request's `Host` is checked as for a server on a network.
    """
    return msgspec.structs.replace(config.server, host=ANY_ADDRESS)


_WHY_NOT = {
    "events": "each replica publishes its own events at a free port; leave the table out",
    "sidecar": "the application starts the sidecar; give the sidecar's tables in the application's argument sidecar",
    "documents": "documents are kept by one server, but replicas come and go; leave the table out",
    "disk": "replicas of a node cannot share a folder; give the table as sidecar.disk",
}
