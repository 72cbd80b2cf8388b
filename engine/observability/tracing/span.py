"""Span: one period of time in a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.engine.observability.tracing.trace_context import TraceContext

Attribute = str | int | float


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a trace. *parent_id* is None for the root span.

    Times are in seconds since the Unix epoch. No attribute contains text of the user.
    """

    name: str
    context: TraceContext
    parent_id: str | None
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    is_server: bool = False  # whether it answers a request from the network
    is_failed: bool = False
    links: Sequence[TraceContext] = ()  # related spans of other traces, all of them sampled
