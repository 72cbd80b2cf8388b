"""`prompt_logprobs`: the log probabilities of a prompt's tokens, in vLLM's format."""

from collections.abc import Sequence

from kvtier.engine.model.logprobs import TokenLogprobs
from kvtier.server.token_text import TokenText, finite


def prompt_logprobs(
    told: Sequence[TokenLogprobs | None], num_top: int, text: TokenText
) -> list[dict[str, dict[str, object]] | None]:
    """Return for each token None or an object by token id: the token itself, then the *num_top* likeliest."""
    return [None if item is None else _of_token(item, num_top, text) for item in told]


def _of_token(item: TokenLogprobs, num_top: int, text: TokenText) -> dict[str, dict[str, object]]:
    likeliest = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(item.top[:num_top], 1)]
    found: dict[str, dict[str, object]] = {}
    for token_id, logprob, rank in [(item.token_id, item.logprob, item.rank), *likeliest]:
        told = {"logprob": finite(logprob), "rank": rank, "decoded_token": text.of(token_id)}
        found.setdefault(str(token_id), told)
    return found
