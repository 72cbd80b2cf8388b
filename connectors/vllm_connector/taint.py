"""`Taint`: vLLM's pages that hold wrong bytes because a load failed, and the requests that computed from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.connectors.vllm_connector.vllm_request import NULL_PAGE, Pages
from kvtier.tiers.naming.groups import AttentionGroup


@dataclass(slots=True, eq=False)
class Placement:
    """The pages that vLLM has allocated to a request, until the request is preempted or ends."""

    pages: Pages  # as last seen; vLLM appends to them
    num_good: int | None = None  # tokens before the first tainted page; None if no page is tainted

    def limit(self, num_tokens: int) -> int:
        """Return how many of the first *num_tokens* tokens do not depend on a page whose load failed."""
        return num_tokens if self.num_good is None else min(num_tokens, self.num_good)


class Taint:
    """A record of vLLM's tainted pages, which hold wrong bytes, so that their blocks are not stored.

    A page is tainted if its load failed, or if it was computed from tainted pages. After a failed load, vLLM computes
    the request again in the same pages, and may share these pages with other requests in the meantime. So a page stays
    tainted until it is loaded, or computed from good pages only.
    """

    def __init__(self, groups: Sequence[AttentionGroup]) -> None:
        self._sizes = [group.block_size for group in groups]
        self._pages: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """True if no page is marked as holding wrong bytes."""
        return not self._pages

    def place(self, pages: Pages, num_cached: int) -> Placement:
        """Return a record of the *pages* that vLLM has just allocated to a request.

        The pages of the first *num_cached* tokens come from vLLM's own cache. Some of them may hold wrong bytes because
        a load failed. The remaining pages will be loaded or computed, so they are no longer marked as wrong.
        """
        placement = Placement(pages)
        if self._pages:
            for size, ids in zip(self._sizes, pages, strict=True):
                self._pages.difference_update(ids[num_cached // size :])
            placement.num_good = self._first_tainted(placement)
        return placement

    def on_computed(self, placement: Placement, start: int, end: int) -> None:
        """Update which pages are marked as wrong, for a step that computes a request's tokens *start* to *end* - 1.

        If these tokens depend on a page with wrong bytes, their pages are marked too. Otherwise, the marks of the
        request's full pages before *end* are removed.
        """
        if placement.num_good is not None and placement.num_good < start:
            self._taint_rest(placement)
            return
        placement.num_good = None  # vLLM computes again from the last good token on
        if self._pages:
            for size, ids in zip(self._sizes, placement.pages, strict=True):
                self._pages.difference_update(ids[: end // size])

    def spread(self, unloaded: Iterable[int], placements: Sequence[Placement]) -> list[Placement]:
        """Mark as wrong the *unloaded* pages, whose load failed, and the pages that requests computed from them.

        *placements* has each request's pages.

        Returns:
            The placements of the requests that now have fewer tokens with right bytes.
        """
        self._pages.update(unloaded)
        affected: dict[Placement, None] = {}
        while found := [placement for placement in placements if self._is_worse(placement)]:
            for placement in found:
                self._taint_rest(placement)
            affected.update(dict.fromkeys(found))
        return list(affected)

    def _is_worse(self, placement: Placement) -> bool:
        first = self._first_tainted(placement)
        if first is None or (placement.num_good is not None and placement.num_good <= first):
            return False
        placement.num_good = first
        return True

    def _first_tainted(self, placement: Placement) -> int | None:
        """Return the index of the request's first token in a page with wrong bytes, or None if there is none."""
        firsts = [
            block * size
            for size, ids in zip(self._sizes, placement.pages, strict=True)
            for block, page in enumerate(ids)
            if page in self._pages
        ]
        return min(firsts, default=None)

    def _taint_rest(self, placement: Placement) -> None:
        assert placement.num_good is not None
        for size, ids in zip(self._sizes, placement.pages, strict=True):
            self._pages.update(page for page in ids[placement.num_good // size :] if page != NULL_PAGE)
