"""The spans of a version's way: its publication, and the hop to each relay. Pure.

    publish                 on the master, from the announcement to the seal, or to why there is none
      fetch                 on each other relay, below the span of the relay that the bytes came from

A version's context is a label of it (`traceparent`), and so in its records. The ids of the relays' spans are derived
from it and their names: each relay knows the id of its upstream's. The span of a fetch that failed is not made: the
version is tried again, and the one that succeeds has the id. What a relay reads back from its disk is no hop.
"""

from __future__ import annotations

from collections.abc import Mapping

from paramserver.core.records import Holding, Manifest
from protos.telemetry.context import TRACEPARENT, TraceContext, parse_traceparent
from protos.telemetry.spans import Attribute, Span, Tracer
from protos.version_labels import LABELS_MAX


def begun(labels: Mapping[str, str], tracer: Tracer | None) -> dict[str, str]:
    """The labels of a version that is announced: with a trace of its own, if it has none and is sampled. What is no
    valid context is left out, since all other relays would ignore it."""
    if parse_traceparent(labels.get(TRACEPARENT)) is not None:
        return dict(labels)
    found = {name: text for name, text in labels.items() if name != TRACEPARENT}
    root = None if tracer is None else tracer.begin()
    if root is not None and root.sampled and len(found) < LABELS_MAX:
        found[TRACEPARENT] = root.child("version").traceparent
    return found


def relay_trace(labels: Mapping[str, str], relay: str) -> TraceContext | None:
    """The context of the span with which a version came to a relay; None for one without a trace."""
    version = parse_traceparent(labels.get(TRACEPARENT))
    return None if version is None else version.child(f"relay {relay}")


def publish_span(
    manifest: Manifest,
    labels: Mapping[str, str],
    relay: str,
    *,
    announced_unix_s: float,
    ended_unix_s: float,
    error: str = "",
) -> Span | None:
    """On the master, of a version that was sealed or, with an `error`, given up."""
    version, context = parse_traceparent(labels.get(TRACEPARENT)), relay_trace(labels, relay)
    if version is None or context is None:
        return None
    root = TraceContext(version.trace_id, "", version.sampled)
    parent = (
        None if version == root.child("version") else version
    )  # of a trace that begins here there is no publisher's
    attributes: dict[str, Attribute] = {
        **_of_version(manifest),
        "laminar.relay": relay,
        "laminar.step": manifest.step,
        "laminar.run": manifest.run,
    }
    return Span("publish", context, parent, announced_unix_s, ended_unix_s, attributes, "producer", error=error)


def fetch_span(
    manifest: Manifest,
    labels: Mapping[str, str],
    relay: str,
    holding: Holding,
    *,
    duration_s: float,
    ended_unix_s: float,
) -> Span | None:
    """On a relay that has the whole version from another one."""
    context = relay_trace(labels, relay)
    if context is None:
        return None
    attributes: dict[str, Attribute] = {
        **_of_version(manifest),
        "laminar.relay": relay,
        "laminar.upstream": holding.upstream,
        "laminar.transport": holding.transport,
        "laminar.rate_bytes_s": holding.rate_bytes_s,
    }
    parent = relay_trace(labels, holding.upstream)
    return Span("fetch", context, parent, ended_unix_s - duration_s, ended_unix_s, attributes, "consumer")


def _of_version(manifest: Manifest) -> dict[str, Attribute]:
    return {
        "laminar.model": manifest.model,
        "laminar.version": manifest.version,
        "laminar.size_bytes": manifest.size_bytes,
    }
