"""The operators and the tokens that authorize them to send verbs (commands such as reset and pin)."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import AuditLog

TOKEN = "KVTIER_OPERATOR_TOKEN"  # environment variable with the token of the operator that is called NAME
NAME = "operator"
REFUSED_S = 60.0  # min time between two lines of the audit log about wrong tokens


class Operators:
    """The operators and their tokens, which authorize requests. Only digests of the tokens are kept."""

    def __init__(self, tokens: ApiKeys) -> None:
        """Create the operators. *tokens* maps each token to an operator's name, as API keys are mapped to tenants."""
        self._tokens = tokens

    @classmethod
    def of(cls, file: str | None, environment: Mapping[str, str]) -> "Operators | None":
        """Return the operators in *file*, or the one whose token is in *environment*, or None if neither is given.

        Raises ValueError if both are given, if a token is invalid, or if *file* is unusable.
        """
        token = environment.get(TOKEN)
        if file is not None:
            if token:
                raise ValueError(f"both operators.tokens and {TOKEN} are set; give one of them")
            return cls(ApiKeys.from_file(Path(file).expanduser(), "operators' tokens"))
        if not token:
            return None
        try:
            return cls(ApiKeys({token: NAME}))
        except ValueError as error:
            raise ValueError(f"{TOKEN}: {error}") from None

    def refuse_keys_of(self, keys: ApiKeys | None) -> None:
        """Raise ValueError if a token is also an API key, because then a client could act as an operator."""
        if keys is not None and self._tokens.digests & keys.digests:
            raise ValueError("an operator's token is an API key too; make another token with openssl rand -hex 32")

    def name_of(self, authorization: str) -> str | None:
        """Return the operator whose token is in the header *authorization*, or None.

        Takes the same time for all tokens, so that response times do not help to guess a token.
        """
        scheme, _, token = authorization.partition(" ")
        return self._tokens.tenant_of(token.strip()) if scheme.lower() == "bearer" else None


class RefusedTokens:
    """A counter of requests with a wrong token, for the audit log. Owned by the event loop."""

    def __init__(self, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._clock = clock
        self._num_refused = 0
        self._told_at = float("-inf")

    def note(self) -> None:
        """Count a request with a wrong token. Write the count to the audit log at most once per `REFUSED_S` seconds.

        Otherwise a client could fill the log until the older lines are deleted.
        """
        self._num_refused += 1
        if self._clock() >= self._told_at + REFUSED_S:
            self._audit.write(None, "", {}, {"status": 401, "times": self._num_refused})
            self._num_refused, self._told_at = 0, self._clock()
