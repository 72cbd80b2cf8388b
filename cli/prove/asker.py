"""Asker: one model of one server, asked in the way that the server takes."""

from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.dialect import Dialect
from kvtier.cli.prove.endpoint import Endpoint

NUM_TOKENS = 8  # of an answer

Prompt: TypeAlias = str | list[int]


@dataclass(frozen=True)
class Asker:
    """One model of one server; *name* is what reports call it. Threads may share it."""

    endpoint: Endpoint
    model: str
    name: str
    dialect: Dialect = field(compare=False)

    def ask(self, prompt: Prompt, salt: str | None = None, is_read: bool = True) -> Answer:
        """The greedy answer, of `NUM_TOKENS`. Blocks under *salt* may serve it; none may if not *is_read*.

        OSError if no server answers, `Refused` if it does with an error.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **self.dialect.extra}
        if salt is not None:
            body["cache_salt"] = salt  # vLLM, SGLang, kvtier
        if not is_read:
            body["cache_prompt"] = False  # llama.cpp
        return self.endpoint.complete(body)
