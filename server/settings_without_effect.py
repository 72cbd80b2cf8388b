"""Finds settings that have no effect because of other settings or the model, for `--check-config`."""

from collections.abc import Collection, Iterator

from kvtier.engine.config import Config, DeviceConfig, DiskConfig, SchedulerConfig, ServerConfig
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.web.api_keys import ApiKeys


def settings_without_effect(config: Config, groups: Collection[AttentionGroup], keys: ApiKeys | None) -> list[str]:
    """Return a line `key: reason` for each setting that differs from its default but has no effect."""
    return [
        *_of_the_engine(config, groups),
        *_of_looking_ahead(config),
        *_of_the_disk(config.disk),
        *_of_the_server(config.server, config.scheduler, keys),
        *_of_tenants(config, keys),
    ]


def _of_the_engine(config: Config, groups: Collection[AttentionGroup]) -> Iterator[str]:
    scheduler, default = config.scheduler, SchedulerConfig()
    if config.device.gpu_memory_utilization is not None and config.device.capacity != DeviceConfig().capacity:
        yield "device.capacity: gpu_memory_utilization takes its place"
    if config.device.retention_tokens is not None and not any(group.forgets for group in groups):
        yield "device.retention_tokens: no layer of this model has a sliding window or a recurrent state"
    has_tiers = config.host is not None or config.sidecar is not None
    if not has_tiers and scheduler.by_layers != default.by_layers:
        yield "scheduler.by_layers: there is no host tier to load from"
    if not has_tiers and scheduler.load != default.load:
        yield "scheduler.load: there is no tier to load from"
    if scheduler.token_budget < scheduler.prefill_chunk != default.prefill_chunk:
        yield f"scheduler.prefill_chunk: token_budget is {scheduler.token_budget}, so no chunk is longer"
    if scheduler.token_budget < scheduler.max_running != default.max_running:
        yield f"scheduler.max_running: token_budget is {scheduler.token_budget}, so no more can decode in a step"
    if config.metrics_port is None and config.metrics_host != Config().metrics_host:
        yield "metrics_host: without metrics_port, /metrics is on the server's own address"


def _of_looking_ahead(config: Config) -> Iterator[str]:
    scheduler, default = config.scheduler, SchedulerConfig()
    settings = {"look_ahead": scheduler.look_ahead, "look_ahead_s": scheduler.look_ahead_s}
    changed = [name for name, value in settings.items() if value != getattr(default, name)]
    for name in changed:
        if config.disk is None and config.remote is None and config.sidecar is None:
            yield f"scheduler.{name}: there is no [disk] to prefetch from"
        elif name == "look_ahead_s" and not scheduler.look_ahead:
            yield "scheduler.look_ahead_s: look_ahead is 0, so nothing is prefetched"


def _of_the_disk(disk: DiskConfig | None) -> Iterator[str]:
    if disk is not None and disk.durability != "interval" and disk.checkpoint_s != DiskConfig(path="-").checkpoint_s:
        yield f'disk.checkpoint_s: durability is "{disk.durability}"; only "interval" has checkpoints'


def _of_the_server(server: ServerConfig, scheduler: SchedulerConfig, keys: ApiKeys | None) -> Iterator[str]:
    max_queued = scheduler.max_waiting - scheduler.max_running
    if max_queued < server.max_queued != ServerConfig().max_queued:
        yield f"server.max_queued: scheduler.max_waiting limits running and waiting requests to {scheduler.max_waiting}"
    if keys is not None and server.allowed_hosts:
        yield "server.allowed_hosts: with api_keys clients may use any host name"
    if server.max_connections < server.max_connections_per_address != ServerConfig().max_connections_per_address:
        yield f"server.max_connections_per_address: server.max_connections allows only {server.max_connections}"
    if keys is None and server.tenant_isolation != ServerConfig().tenant_isolation:
        yield "server.tenant_isolation: without api_keys there are no tenants"
    if server.metrics_tenants and keys is None:
        yield "server.metrics_tenants: without api_keys /metrics is open"
    elif server.metrics_tenants and server.tenant_isolation == "off":
        yield 'server.metrics_tenants: with tenant_isolation "off" every key may read /metrics'
    if keys is not None:
        for tenant in set(server.metrics_tenants) - keys.tenants:
            yield f"server.metrics_tenants: the tenant {tenant} has no key"


def _of_tenants(config: Config, keys: ApiKeys | None) -> Iterator[str]:
    for salt, tenant in config.tenants.items():
        name = tenant.name or "..."  # the salt may be a secret
        if config.host is None and tenant.host is not None:
            yield f"tenants.{name}.host: there is no host tier"
        if config.disk is None and tenant.disk is not None:
            yield f"tenants.{name}.disk: there is no [disk]"
        if keys is not None and salt not in keys.tenants:
            yield f"tenants.{name}: this tenant has no key; with api_keys, [tenants] must use the names in the key file"
        elif keys is not None and config.server.tenant_isolation == "off":
            yield f'tenants.{name}: with tenant_isolation "off" it applies only to requests with a cache_salt'
