"""The salt of a request's blocks, made of its tenant and the cache_salt that it asks for: equal salts share blocks."""

import msgspec

from kvtier.engine.config import Config
from kvtier.web.api_keys import ApiKeys


def with_tenant_names(config: Config, keys: ApiKeys | None) -> Config:
    """*config*, with quotas named in metrics after tenants that have keys: a salt may be a secret, a name is none."""
    if keys is None:
        return config
    tenants = {
        salt: msgspec.structs.replace(tenant, name=salt) if tenant.name is None and salt in keys.tenants else tenant
        for salt, tenant in config.tenants.items()
    }
    return msgspec.structs.replace(config, tenants=tenants)


def effective_salt(tenant: str | None, asked: str | None, is_strict: bool) -> str | None:
    """The cache_salt that a request's blocks are named with. Without API keys (*tenant* None) it is what was *asked*.

    Else it begins with the tenant, so that no tenant reaches another's blocks by asking for a salt. Only requests that
    ask for none share theirs, unless isolation *is_strict*. All salts of a tenant count for its quota
    (`tiers.naming.tenant.tenant_of`).
    """
    if tenant is None or (asked is None and not is_strict):
        return asked
    return f"{tenant}\0{asked or ''}"
