"""The options of telemetry that daemons share, and the one place that switches its export on."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import click
from msgspec import Meta

from protos.errors import InvalidRequest
from protos.extras import install
from protos.options import Flag
from protos.telemetry.spans import Tracer

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

    from protos.telemetry.otlp import Export

log = logging.getLogger(__name__)

DISABLED = "OTEL_SDK_DISABLED"


class CollectorUrl(click.ParamType[str]):
    """The base URL of an OTLP collector: http://HOST:PORT."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> str:
        try:
            parts = urlsplit(str(value))
            found = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
            )
        except ValueError:
            found = False
        if found and parts.username is not None:  # the address is logged
            self.fail("it holds credentials: give them by OTEL_EXPORTER_OTLP_HEADERS", param, context)
        if not found:
            self.fail(f"{str(value)[:200]!r} is not a URL like http://127.0.0.1:4318", param, context)
        return str(value).rstrip("/")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """`otlp` None: nothing is exported, and none of the SDK that does it is imported."""

    otlp: Annotated[
        str | None,
        CollectorUrl(),
        Flag(metavar="URL", envvar="OTEL_EXPORTER_OTLP_ENDPOINT", show_envvar=True, show_default="nothing is exported"),
        "Export metrics, traces and logs to an OpenTelemetry collector, by OTLP over HTTP, such as "
        "http://127.0.0.1:4318. Needs laminar-rl[otlp].",
    ] = None
    trace_ratio: Annotated[
        float,
        Meta(ge=0, le=1),
        "With --otlp: share of traces that are sampled, 0 to 1. A trace that a caller began is sampled if the caller "
        "says so.",
    ] = 0.01


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a daemon reports with; `OFF` exports nothing. `close` blocks for a few seconds at most."""

    tracer: Tracer | None = None
    meter: Meter | None = None
    export: Export | None = None

    def close(self) -> None:
        if self.export is not None:
            self.export.close()


OFF = Telemetry()


def start(config: TelemetryConfig, service: str, **names: str) -> Telemetry:
    """Begins to export what the daemon reports, if `--otlp` is given. `names`: by glossary, what the process is of,
    such as its relay's name. InvalidRequest when the packages for it are not installed."""
    if config.otlp is None:
        return OFF
    if os.environ.get(DISABLED, "").strip().lower() == "true":
        log.warning("nothing is exported to %s: %s is set", config.otlp, DISABLED)
        return OFF
    try:
        from protos.telemetry.otlp import Export
    except ImportError as error:
        raise InvalidRequest(
            f"--otlp (or OTEL_EXPORTER_OTLP_ENDPOINT) needs packages that are not installed: {error}",
            hint=install("otlp"),
        ) from error
    export = Export(config.otlp, service, names)
    log.info("exporting to %s; %g of new traces are sampled", config.otlp, config.trace_ratio)
    return Telemetry(Tracer(export.record, config.trace_ratio), export.meter, export)
