"""Span: one stretch of time in a trace, in names and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.engine.observability.tracing.trace_context import TraceContext

Attribute = str | int | float


@dataclass(frozen=True, slots=True)
class Span:
    """*parent_id* is the span of the same trace that it is a part of; None: the first one. Times are in seconds since
    the Unix epoch. No attribute has a text of the user's."""

    name: str
    context: TraceContext
    parent_id: str | None
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    is_server: bool = False  # it answers a request that came over a network
    is_failed: bool = False
    links: Sequence[TraceContext] = ()  # spans of other traces that had to do with it, all of them sampled
