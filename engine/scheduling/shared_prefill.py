"""SharedPrefill: a prompt's beginning that another request is about to compute is waited for, not computed twice."""

from collections.abc import Collection

from kvtier.engine.scheduling.request import Request


class SharedPrefill:
    """Says who had better wait. Ten questions about a document that is new to everybody cost its prefill once."""

    def __init__(self, least_tokens: int) -> None:
        """For less than *least_tokens*, one chunk, nobody waits: a request computes them within a step itself."""
        self._least_tokens = least_tokens

    def serves(self, request: Request, prefilling: Collection[Request]) -> bool:
        """Whether one of those that are *prefilling*, or about to, will soon have computed what the request needs too.

        Not one that is less urgent, and may have to give way; nor one that does not take all that is cached: the
        request may find at once what that one computes.
        """
        return request.options.reads_cache and any(
            self._num_tokens_ahead(request, other) >= self._least_tokens
            for other in prefilling
            if other.options.takes_all_hits and other.options.priority <= request.options.priority
        )

    @staticmethod
    def _num_tokens_ahead(request: Request, other: Request) -> int:
        """How many tokens that both begin with the other is still to compute."""
        there = other.num_computed if other.loading is None else other.loading.num_tokens
        return num_common_tokens(request, other) - there


def num_common_tokens(one: Request, other: Request) -> int:
    """Tokens in full blocks with which both begin. A name stands for everything before it, so halving finds the last.

    (A prompt without a full block in common, as most are, costs one comparison.)
    """
    names, others = one.chain.names, other.chain.names
    low, high = 0, min(len(names), len(others))
    if not high or names[0] != others[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if names[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low * one.chain.block_size
