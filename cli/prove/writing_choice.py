"""choose_writing: how prompts are written for a server, learned by asking."""

from kvtier.cli.prove.asker import Asker
from kvtier.cli.prove.dialect import unless_refused
from kvtier.cli.prove.endpoint import Endpoint, Refused
from kvtier.cli.prove.writing import WORDS, TokenIds, Words, Writing

_FEW = 40  # words, which fit any model
_LEAST_IDS = 64  # with fewer different tokens prompts would begin alike by chance


def choose_writing(asker: Asker) -> tuple[Writing, Words]:
    """Token ids where the server takes them, those of ordinary words if it says which they are; else words. Behind it
    words in any case."""
    answer = asker.ask(" ".join(WORDS[:_FEW]))
    words = Words((answer.prompt_tokens or _FEW) / _FEW)
    ids = _ids_of_words(asker.endpoint, asker.model)
    writing = TokenIds(ids) if len(ids) >= _LEAST_IDS else TokenIds()
    prompt = writing.write(range(_LEAST_IDS))
    taken = unless_refused(asker.ask, prompt)
    if taken is None or taken.prompt_tokens not in (None, len(prompt), len(prompt) + 1):  # one that it begins with
        return words, words
    return writing, words


def _ids_of_words(endpoint: Endpoint, model: str) -> tuple[int, ...]:
    """The tokens of ordinary words, as vLLM and llama.cpp tell them; none if the server does not."""
    text = " ".join(WORDS)
    try:
        found = endpoint.post("/tokenize", {"model": model, "prompt": text, "content": text})
        return tuple(sorted({int(token) for token in found["tokens"][1:]}))  # the first may be no word's
    except (Refused, KeyError, TypeError, ValueError):
        return ()
