"""The salt of a request's blocks, made from its tenant and its cache_salt. Requests with equal salts share blocks."""

import msgspec

from kvtier.engine.config import Config
from kvtier.web.api_keys import ApiKeys


def with_tenant_names(config: Config, keys: ApiKeys | None) -> Config:
    """Name the quotas of tenants that have keys after these tenants in metrics. Other salts may be secrets."""
    if keys is None:
        return config
    tenants = {
        salt: msgspec.structs.replace(tenant, name=salt) if tenant.name is None and salt in keys.tenants else tenant
        for salt, tenant in config.tenants.items()
    }
    return msgspec.structs.replace(config, tenants=tenants)


def effective_salt(tenant: str | None, asked: str | None, is_strict: bool) -> str | None:
    """Return the salt that names a request's blocks. It is the *asked* `cache_salt` if there are no API keys.

    With API keys (*tenant* is not None) the salt begins with the tenant, so no *asked* salt gives access to another
    tenant's blocks. Tenants share only the blocks of requests without a salt, and not even these if isolation
    *is_strict*. All salts of a tenant count towards its quota (`tiers.naming.tenant.tenant_of`).
    """
    if tenant is None or (asked is None and not is_strict):
        return asked
    return f"{tenant}\0{asked or ''}"
