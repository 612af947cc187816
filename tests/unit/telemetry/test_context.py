"""Trace contexts: what a `traceparent` may be, which traces are sampled, and which ids are derived."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from protos.telemetry.context import TraceContext, current_traceparent, parse_traceparent
from protos.telemetry.spans import Span, Tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (VALID, True),
        (f" {VALID} ", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # with a flag of a later version
        (f"01-{TRACE}-{SPAN}-01-more", True),  # of a later version
    ],
)
def test_a_valid_header_is_a_context(text: str, sampled: bool) -> None:
    assert parse_traceparent(text) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00",
        VALID[:-1],
        VALID.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",  # the first version has no more
        f"00-{TRACE}-{SPAN}-0g",
        f"{VALID},{VALID}",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 1000,
        "\r\nX: y",
        "\u0660" * 55,
    ],
)
def test_what_is_no_header_is_ignored(text: str | None) -> None:
    assert parse_traceparent(text) is None


def test_a_context_is_its_header_again() -> None:
    context = parse_traceparent(VALID)
    assert context is not None
    assert context.traceparent == VALID
    child = context.child("turn a")
    assert parse_traceparent(child.traceparent) == child


def test_ids_are_derived_from_the_trace_and_the_name() -> None:
    here, there = TraceContext(TRACE, "", sampled=True), TraceContext(TRACE, SPAN, sampled=True)
    assert here.child("turn a") == there.child("turn a"), "whatever span of the trace is known"
    other = TraceContext(TRACE[::-1], "", sampled=True)
    assert len({here.child("turn a").span_id, here.child("turn b").span_id, other.child("turn a").span_id}) == 3


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_the_share_that_is_sampled_is_the_sdks(ratio: float) -> None:
    tracer, sampler = Tracer(print, ratio), TraceIdRatioBased(ratio)
    for _ in range(200):
        root = tracer.begin()
        found = sampler.should_sample(None, int(root.trace_id, 16), "session")
        assert root.sampled == (found.decision is Decision.RECORD_AND_SAMPLE)


def test_only_spans_of_sampled_traces_are_recorded() -> None:
    recorded: list[Span] = []
    tracer = Tracer(recorded.append, 1.0)
    for sampled in (True, False):
        context = TraceContext(TRACE, SPAN, sampled)
        tracer.record(Span("x", context, None, 0.0, 1.0, {}))
    assert [span.context.sampled for span in recorded] == [True]


def test_without_a_span_of_its_own_a_process_has_no_context(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert current_traceparent() == ""
    assert not caplog.records


def test_the_span_of_a_process_that_traces_is_its_context() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(shutdown_on_exit=False)
    with provider.get_tracer("trainer").start_as_current_span("step") as span:
        found = parse_traceparent(current_traceparent())
        assert found is not None
        assert int(found.span_id, 16) == span.get_span_context().span_id
        assert found.sampled
