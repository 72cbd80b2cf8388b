"""`RayServeConfig`: the configuration of kvtier as a Ray Serve application."""

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

ANY_ADDRESS = "0.0.0.0"  # selects the browser rules of a server on a network; no socket listens at this address


class RayServeConfig(Table, frozen=True, kw_only=True):
    """The arguments of `build_app`.

    *config* is the path of a configuration file of `kvtier serve`, and *engine* has tables that override the file.
    *sidecar* is the configuration of `kvtier sidecar`, which then runs on each node. Without *sidecar*, replicas share
    no blocks. *policy*, *index* and *tokens* are the tables of these names in the configuration of `kvtier route`.

    *replicas* and *fronts* are Ray's options of the deployments `Engine` and `Front`, such as `num_replicas`,
    `autoscaling_config` and `ray_actor_options`.
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
        """Return the configuration of a replica's engine, with additional *tables*.

        Raises `ConfigError` if the configuration is invalid.
        """
        return config_from_dict({**self.engine_tables(), **tables}, "engine")

    def engine_tables(self) -> Mapping[str, object]:
        """Return the tables of the engine's configuration: those in the file *config*, overridden by *engine*."""
        return merge_tables({} if self.config is None else load_toml(self.config), self.engine)


def ray_serve_config(args: Mapping[str, object]) -> RayServeConfig:
    """Parse and check the arguments of an application.

    Raises:
        ConfigError: If the arguments, including the engine's and the sidecar's tables, are invalid.
    """
    config: RayServeConfig = tree_from_dict(RayServeConfig, args, "ray")
    for key in _WHY_NOT.keys() & config.engine_tables().keys():
        raise ConfigError(f"engine: $.{key}: {_WHY_NOT[key]}")
    config.engine_config()
    if config.sidecar is not None:
        sidecar_config(None, config.sidecar)
        config.engine_config(sidecar="unix:///tmp/kvtier.sock")  # raises for tables that belong to the sidecar
    return config


def server_settings(config: Config) -> ServerConfig:
    """Return the server settings of an engine's configuration, adapted to Ray Serve.

    The addresses of Ray's HTTP proxies are unknown. So the `Host` of a request is checked as if the server listened on
    a network address.
    """
    return msgspec.structs.replace(config.server, host=ANY_ADDRESS)


_WHY_NOT = {
    "events": "each replica publishes its own events at a free port; leave the table out",
    "sidecar": "the application starts the sidecar; give the sidecar's tables in the application's argument sidecar",
    "documents": "documents are kept by one server, but replicas come and go; leave the table out",
    "disk": "replicas of a node cannot share a folder; give the table as sidecar.disk",
}
