"""With whom a request shares cached blocks: the salt that is used, from the tenant and the salt that was asked for."""

import msgspec

from kvtier.engine.config import Config
from kvtier.engine.server.api_keys import ApiKeys


def with_names(config: Config, keys: ApiKeys | None) -> Config:
    """*config* with quotas under the names of the keys' tenants in metrics: these are no secrets, as salts may be."""
    if keys is None:
        return config
    tenants = {
        salt: msgspec.structs.replace(tenant, name=salt) if tenant.name is None and salt in keys.tenants else tenant
        for salt, tenant in config.tenants.items()
    }
    return msgspec.structs.replace(config, tenants=tenants)


def effective_salt(tenant: str | None, asked: str | None, is_strict: bool) -> str | None:
    """The cache_salt of a request. Without API keys (*tenant* None) it is what was asked for.

    Else it begins with the tenant, so nobody comes to another's blocks by asking for a salt; only requests without one
    share theirs, unless isolation *is_strict*. A tenant's salts all count for its quota (`tiers.tenants.tenant_of`).
    """
    if tenant is None or (asked is None and not is_strict):
        return asked
    return f"{tenant}\0{asked or ''}"
