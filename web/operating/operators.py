"""Operators: who may have verbs carried out, by their tokens."""

from collections.abc import Mapping
from pathlib import Path

from kvtier.web.api_keys import ApiKeys

TOKEN = "KVTIER_OPERATOR_TOKEN"  # of the environment: a token of an operator who is called …
NAME = "operator"


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
