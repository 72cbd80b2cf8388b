"""`Salts`: the salts with which replicas name the blocks of requests."""

from kvtier.web.api_keys import ApiKeys
from kvtier.web.tenancy import effective_salt


class Salts:
    """The salts of requests, from the replicas' keys if there are any, because blocks are named by tenant.

    Does not check keys: every request passes.
    """

    def __init__(self, keys: ApiKeys | None, is_strict: bool) -> None:
        self._keys, self._is_strict = keys, is_strict

    def of(self, who: str, asked: str | None) -> str | None:
        """Return a request's salt; *who* is the header with its credentials, *asked* its own salt."""
        if self._keys is None:
            return asked
        scheme, _, token = who.partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else who
        return effective_salt(self._keys.tenant_of(key), asked, self._is_strict)
