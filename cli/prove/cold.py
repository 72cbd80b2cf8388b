"""Cold: how a server is asked so that nothing that it has cached serves the prompt."""

from collections.abc import Sequence
from enum import Enum, auto

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.asker import Asker, Prompt
from kvtier.cli.prove.endpoint import Refused

_SOONER = 0.5  # a first token within this share of the cold one's time came from a cache


class Cold(Enum):
    """With a salt that no request had, or with nothing looked up."""

    SALT = auto()
    UNREAD = auto()

    def ask(self, asker: Asker, prompt: Prompt, new_salt: str) -> Answer:
        """The answer to *prompt*, computed as a whole."""
        return asker.ask(prompt, salt=new_salt) if self is Cold.SALT else asker.ask(prompt, is_read=False)


def find_cold(asker: Asker, prompts: Sequence[Prompt], new_salt: str) -> Cold | None:
    """How the server can be asked cold; None if in no way that is known, or if it caches nothing.

    *prompts* are long and new to it; *new_salt* has been given to no request.
    """
    first = [asker.ask(prompt) for prompt in prompts]
    if not are_cached([asker.ask(prompt) for prompt in prompts], first):
        return None
    for way in Cold:
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
    """Whether prompts came from a cache at all; *cold* are answers to prompts as long that did not.

    By the cached tokens that the server tells; if it tells none, by the time of the first token of most answers.
    """
    told = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if told:
        return any(told)
    limit_s = _SOONER * min((answer.ttft_s for answer in cold), default=0.0)
    return 2 * sum(answer.ttft_s < limit_s for answer in answers) > len(answers)
