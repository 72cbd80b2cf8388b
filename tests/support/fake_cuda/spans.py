"""Spans: addresses that an operation reads or writes, as sorted half-open intervals."""

from collections.abc import Iterable

Span = tuple[int, int]  # first address, address after the last
Spans = tuple[Span, ...]


def sorted_spans(spans: Iterable[Span]) -> Spans:
    """The spans that are not empty, in order of address."""
    return tuple(sorted(span for span in spans if span[0] < span[1]))


def first_overlap(one: Spans, other: Spans) -> Span | None:
    """The first addresses that are in both."""
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            return start, end
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return None
