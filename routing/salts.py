"""Salts: what replicas name the blocks of a request with."""

from kvtier.web.api_keys import ApiKeys
from kvtier.web.tenancy import effective_salt


class Salts:
    """Knows the replicas' keys, if they have some: their blocks are named by tenant. Lets every request pass."""

    def __init__(self, keys: ApiKeys | None, is_strict: bool) -> None:
        self._keys, self._is_strict = keys, is_strict

    def of(self, who: str, asked: str | None) -> str | None:
        """That of a request in which *who* is the header that says who asks, and *asked* its own salt."""
        if self._keys is None:
            return asked
        scheme, _, token = who.partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else who
        return effective_salt(self._keys.tenant_of(key), asked, self._is_strict)
