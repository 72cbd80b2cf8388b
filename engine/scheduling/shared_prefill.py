"""SharedPrefill: has a request wait for the prompt's beginning that another request is about to compute."""

from collections.abc import Collection

from kvtier.engine.scheduling.request import Request


class SharedPrefill:
    """Decides which requests wait for another's prefill.

    Of ten questions that come together about a new document one computes its whole chunks. What is left of the document
    when less than a chunk is to be computed, all of them compute.
    """

    def __init__(self, least_tokens: int) -> None:
        """No request waits for less than *least_tokens*, one chunk: it computes them within a step itself."""
        self._least_tokens = least_tokens

    def has_to_wait(self, request: Request, prefilling: Collection[Request]) -> bool:
        """Whether one of the *prefilling* requests will soon have computed a beginning that this request needs too.

        A less urgent request does not count, as it may have to give way; nor one that does not take all hits, since
        this request may find at once what that one computes.
        """
        return request.reads_cache and any(
            self._num_tokens_ahead(request, other) >= self._least_tokens
            for other in prefilling
            if other.reads_cache and other.options.takes_all_hits and other.options.priority <= request.options.priority
        )

    @staticmethod
    def _num_tokens_ahead(request: Request, other: Request) -> int:
        """How many tokens, of those that both prompts begin with, the other request has yet to compute."""
        there = other.num_computed if other.loading is None else other.loading.num_tokens
        return num_common_tokens(request, other) - there


def num_common_tokens(one: Request, other: Request) -> int:
    """Tokens of the full blocks that both prompts begin with.

    A block's name stands for everything before it, so halving finds the last one. Two prompts without a common block,
    as most are, cost one comparison.
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
