"""Operators: who may have verbs carried out, by their tokens."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import AuditLog

TOKEN = "KVTIER_OPERATOR_TOKEN"  # of the environment: a token of an operator who is called …
NAME = "operator"
REFUSED_S = 60.0  # between two lines


class Operators:
    """The operators' names by digests of their tokens, which are no API keys."""

    def __init__(self, tokens: ApiKeys) -> None:
        """*tokens* with the name of an operator for each."""
        self._tokens = tokens

    @classmethod
    def of(cls, file: str | None, environment: Mapping[str, str]) -> "Operators | None":
        """Those of the *file*, as of `ApiKeys.from_file`, or the one with the token in the *environment*; None without
        either: nobody may. ValueError for what cannot be used, and for both."""
        token = environment.get(TOKEN)
        if file is not None:
            if token:
                raise ValueError(f"operators.tokens and {TOKEN}: give one of them")
            return cls(ApiKeys.from_file(Path(file).expanduser(), "operators' tokens"))
        if not token:
            return None
        try:
            return cls(ApiKeys({token: NAME}))
        except ValueError as error:
            raise ValueError(f"{TOKEN}: {error}") from None

    def refuse_keys_of(self, keys: ApiKeys | None) -> None:
        """ValueError if one of the tokens is an API key too: a client would be an operator."""
        if keys is not None and self._tokens.digests & keys.digests:
            raise ValueError("an operator's token is an API key too; make another: openssl rand -hex 32")

    def name_of(self, authorization: str) -> str | None:
        """The operator whose token the header *authorization* has; None if it has none. Takes as long in any case."""
        scheme, _, token = authorization.partition(" ")
        return self._tokens.tenant_of(token.strip()) if scheme.lower() == "bearer" else None


class RefusedTokens:
    """The wrong tokens that the audit log has not been told of. Owned by the event loop."""

    def __init__(self, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._clock = clock
        self._num_refused = 0
        self._told_at = float("-inf")

    def note(self) -> None:
        """Note a wrong token. A line for each would let any client push the other lines out of the file."""
        self._num_refused += 1
        if self._clock() >= self._told_at + REFUSED_S:
            self._audit.write(None, "", {}, {"status": 401, "times": self._num_refused})
            self._num_refused, self._told_at = 0, self._clock()
