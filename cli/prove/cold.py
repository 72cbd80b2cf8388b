"""Cold requests: the server computes the whole prompt, even if it has cached a prefix of it."""

from collections.abc import Sequence
from enum import Enum, auto

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.dialect import ModelClient, Prompt
from kvtier.cli.prove.endpoint import Refused

_SOONER = 0.5  # a TTFT below this fraction of the cold TTFT means a cache hit


class CacheBypass(Enum):
    """A way to make a server compute a prompt without its cache."""

    SALT = auto()  # send a salt that no request has had
    UNREAD = auto()  # ask the server not to read the cache

    def ask(self, asker: ModelClient, prompt: Prompt, new_salt: str) -> Answer:
        """Return the answer to *prompt* from a full prefill. *new_salt* must be a salt that no request has had."""
        return asker.ask(prompt, salt=new_salt) if self is CacheBypass.SALT else asker.ask(prompt, is_read=False)


def find_cache_bypass(asker: ModelClient, prompts: Sequence[Prompt], new_salt: str) -> CacheBypass | None:
    """Find a way to bypass the server's cache. Return None if no known way works, or if the server caches nothing.

    *prompts* must be long and new to the server. *new_salt* must be a salt that no request has had.
    """
    first = [asker.ask(prompt) for prompt in prompts]
    if not are_cached([asker.ask(prompt) for prompt in prompts], first):
        return None
    for way in CacheBypass:
        try:
            answers = [way.ask(asker, prompt, new_salt) for prompt in prompts]
        except Refused as error:
            if error.status >= 500:
                raise
        else:
            if not are_cached(answers, first):
                return way
    return None


def are_cached(answers: Sequence[Answer], cold: Sequence[Answer]) -> bool:
    """Return whether any of these *answers* came from a cache.

    If the server reports numbers of cached tokens, these numbers decide. Otherwise most TTFTs must be much shorter than
    those of *cold*, which are answers from full prefills of prompts of the same length.
    """
    told = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if told:
        return any(told)
    limit_s = _SOONER * min((answer.ttft_s for answer in cold), default=0.0)
    return 2 * sum(answer.ttft_s < limit_s for answer in answers) > len(answers)
