"""The valid API keys, and the tenant that each key belongs to."""

import hashlib
import hmac
import json
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvtier.engine.config import Config
from kvtier.store.private_file import read_private

log = logging.getLogger(__name__)

_DIGEST = "sha256:"  # prefix of a key's digest, which a file may have instead of the key itself
_MIN_LENGTH = 8


class ApiKeys:
    """The valid API keys with the tenant of each. Only digests of the keys are kept."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """Create the object from a mapping of keys to tenant names. Raise ValueError for a malformed key or name.

        A key can also be given as its digest: "sha256:" followed by 64 hexadecimal digits.
        """
        self._tenants = {_digest_of(key): tenant for key, tenant in tenants.items()}
        for tenant in tenants.values():
            if not tenant or "\0" in tenant:
                raise ValueError(f"the tenant name {tenant!r} is empty or contains NUL; use another name")

    @classmethod
    def of(cls, file: str | None) -> "ApiKeys | None":
        """Read the keys of *file*, or return None if *file* is None. Raise ValueError as `from_file` does."""
        return None if file is None else cls.from_file(Path(file).expanduser())

    @classmethod
    def from_file(cls, path: Path, what: str = "api keys") -> "ApiKeys":
        """Read a TOML or JSON file whose table `keys` maps each key to its tenant.

        Raises ValueError if the file cannot be read or has no valid keys. Logs a warning if other users can read the
        file. All messages begin with *what*, a name for the content of the file.
        """
        try:
            file = read_private(path)
            content = file.content.decode()
            tables = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
        except OSError as error:
            raise ValueError(f"{what} {path}: {error.strerror}; give a file that can be read") from error
        except ValueError:  # its message may quote the file
            kind = "JSON" if path.suffix == ".json" else "TOML"
            raise ValueError(f'{what} {path}: is not {kind}; write [keys] and lines of "KEY" = "tenant"') from None
        keys = tables.get("keys") if isinstance(tables, dict) and set(tables) == {"keys"} else None
        if not isinstance(keys, dict) or not keys or not all(isinstance(tenant, str) for tenant in keys.values()):
            raise ValueError(f'{what} {path}: needs exactly one table, [keys]; write lines of "KEY" = "tenant" in it')
        if file.exposure is not None:
            log.warning("%s %s: %s", what, path, file.exposure)
        try:
            return cls(keys)
        except ValueError as error:
            raise ValueError(f"{what} {path}: {error}") from None

    @property
    def tenants(self) -> frozenset[str]:
        """The names of all tenants."""
        return frozenset(self._tenants.values())

    @property
    def digests(self) -> frozenset[bytes]:
        """The digests of all keys."""
        return frozenset(self._tenants)

    def tenant_of(self, key: str) -> str | None:
        """Return the tenant of *key*, or None if *key* is unknown. Takes the same time for all keys."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def _digest_of(key: str) -> bytes:
    if key.startswith(_DIGEST):
        try:
            digest = bytes.fromhex(key.removeprefix(_DIGEST))
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError('"sha256:" must be followed by 64 hexadecimal digits; use printf %s KEY | sha256sum')
        return digest
    if len(key) < _MIN_LENGTH or not key.isprintable() or " " in key:
        raise ValueError(
            f"a key is shorter than {_MIN_LENGTH} characters or has spaces; make one with openssl rand -hex 32"
        )
    return hashlib.sha256(key.encode()).digest()


def with_tenant_names(config: Config, keys: ApiKeys | None) -> Config:
    """Return *config* with names for the tenants that have a quota and an API key. Metrics use the names as labels.

    Quotas can also be set for the salts that clients send. They get no name, because a salt may be a secret.
    """
    if keys is None:
        return config
    tenants = {
        salt: msgspec.structs.replace(tenant, name=salt) if tenant.name is None and salt in keys.tenants else tenant
        for salt, tenant in config.tenants.items()
    }
    return msgspec.structs.replace(config, tenants=tenants)


def effective_salt(tenant: str | None, asked: str | None, is_strict: bool) -> str | None:
    """Return the salt of a request's cached blocks. Requests share blocks only if they have the same salt.

    *asked* is the request's `cache_salt`. A server without API keys (*tenant* is None) uses it unchanged. A server with
    API keys puts the tenant in front, so that a client cannot use another tenant's blocks. Requests without a
    `cache_salt` share blocks across tenants, unless *is_strict*. All salts of a tenant count towards its quota.
    """
    if tenant is None or (asked is None and not is_strict):
        return asked
    return f"{tenant}\0{asked or ''}"
