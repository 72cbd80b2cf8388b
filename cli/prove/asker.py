"""A client for one model of one server, which sends requests in the server's dialect."""

from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.dialect import Dialect
from kvtier.cli.prove.endpoint import Endpoint

NUM_TOKENS = 8  # tokens per answer

Prompt: TypeAlias = str | list[int]


@dataclass(frozen=True)
class ModelClient:
    """One model of one server, under the *name* that reports use. Thread-safe."""

    endpoint: Endpoint
    model: str
    name: str
    dialect: Dialect = field(compare=False)

    def ask(self, prompt: Prompt, salt: str | None = None, is_read: bool = True) -> Answer:
        """Return the greedy answer, of `NUM_TOKENS` tokens. Raise as `Endpoint` does.

        Only cached blocks under *salt* may serve the prompt. If *is_read* is False, the server must not use its cache.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **self.dialect.extra}
        if salt is not None:
            body["cache_salt"] = salt  # vLLM, SGLang, kvtier
        if not is_read:
            body["cache_prompt"] = False  # llama.cpp
        return self.endpoint.complete(body)
