"""W3C's header `traceparent`."""

import pytest

from kvtier.engine.observability.tracing.trace_context import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True), ("02", False)])
def test_a_header_says_trace_span_and_whether_it_is_sampled(flags: str, is_sampled: bool) -> None:
    assert TraceContext.of(f"00-{TRACE}-{SPAN}-{flags}") == TraceContext(TRACE, SPAN, is_sampled)


def test_what_comes_behind_is_left_out_in_a_later_version() -> None:
    assert TraceContext.of(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_what_is_no_header_is_none(header: str | None) -> None:
    assert TraceContext.of(header) is None


def test_a_child_is_another_span_of_the_same_trace() -> None:
    root = TraceContext.root(is_sampled=True)
    child = root.child()

    assert (child.trace_id, child.is_sampled) == (root.trace_id, True)
    assert child.span_id != root.span_id
    assert TraceContext.of(child.header) == child
    assert root.trace_id != TraceContext.root(is_sampled=True).trace_id
