"""The export to a collector: what it gets of a process, and that one which is away costs nobody anything."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time

import pytest

from protos.errors import InvalidRequest
from protos.telemetry import options
from protos.telemetry.context import TraceContext
from protos.telemetry.logs import about
from protos.telemetry.metrics import Metric, add_instruments, on_loop, one
from protos.telemetry.options import OFF, CollectorUrl, TelemetryConfig
from protos.telemetry.otlp import CLOSE_S, Export
from protos.telemetry.spans import Span
from tests.support.collector import collecting

ROOT = TraceContext("0af7651916cd43dd8448eb211c80319c", "", sampled=True)
log = logging.getLogger("laminar.test")


def span(number: int, **more: object) -> Span:
    return Span(f"s{number}", ROOT.child(str(number)), ROOT, 100.0, 101.5, {"laminar.engine": "e0"}, **more)  # type: ignore[arg-type]


def test_a_collector_gets_spans_logs_and_metrics() -> None:
    metric: Metric[list[float]] = Metric("counter", "laminar_test", "bytes", "Some.", one(lambda values: values[0]))
    with collecting() as collector:
        export = Export(collector.url, "laminar-test", {"model": "policy"})
        add_instruments(export.meter, [metric], [3.0])
        export.record(span(1))
        export.record(
            Span(
                "s2",
                ROOT.child("2"),
                ROOT.child("1"),
                100.0,
                101.5,
                {"laminar.versions": [1, 2]},
                "client",
                [ROOT.child("3")],
                "why",
            )
        )
        log.error("engine %s failed", "e0", extra=about(ROOT.child("1"), engine="e0"))
        logging.getLogger("opentelemetry.test").error("would be exported, and fail again")
        export.close()
    first, second = collector.one("s1"), collector.one("s2")
    assert (first.trace_id, first.parent) == (ROOT.trace_id, "")
    assert (first.started, first.ended) == (100_000_000_000, 101_500_000_000)
    assert first.service["service.name"] == "laminar-test"
    assert first.service["laminar.model"] == "policy"
    assert (second.parent, second.links, second.error) == (first.span_id, (ROOT.child("3").span_id,), "why")
    assert second.attributes == {"laminar.versions": [1, 2]}
    (record,) = collector.logs
    assert (record.logger, record.body, record.attributes) == (
        "laminar.test",
        "engine e0 failed",
        {"laminar.engine": "e0"},
    )
    assert (record.trace_id, record.span_id) == (first.trace_id, first.span_id)
    assert collector.metrics["laminar_test"] == [({}, 3.0)]


async def test_metrics_are_read_on_the_loop_that_owns_them() -> None:
    seen: list[object] = []

    def read(_: object) -> float:
        seen.append(asyncio.get_running_loop())
        return True  # as many of the tables' are

    metric: Metric[object] = Metric("gauge", "laminar_test", "", "Some.", one(read))
    with collecting() as collector:
        export = Export(collector.url, "laminar-test", {})
        add_instruments(export.meter, [metric], None, on_loop(asyncio.get_running_loop()))
        await asyncio.to_thread(export.close)
    assert collector.metrics["laminar_test"] == [({}, 1.0)]
    assert set(seen) == {asyncio.get_running_loop()}


@pytest.mark.slow
def test_a_collector_that_is_away_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who records, beyond what the queue holds, nor the end of the process."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        export = Export(f"http://127.0.0.1:{silent.getsockname()[1]}", "laminar-test", {})
        began = time.monotonic()
        for number in range(5000):
            export.record(span(number))
        recorded_s = time.monotonic() - began
        export.close()
        closed_s = time.monotonic() - began - recorded_s
    assert recorded_s < 60, "5,000 spans take some tenths of a second"
    assert CLOSE_S <= closed_s < 60


def test_it_is_off_by_default_and_by_the_standard_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.start(TelemetryConfig(), "laminar-test") is OFF
    monkeypatch.setenv(options.DISABLED, "True")
    assert options.start(TelemetryConfig(otlp="http://127.0.0.1:4318"), "laminar-test") is OFF


def test_without_its_packages_the_start_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "protos.telemetry.otlp", None)
    with pytest.raises(InvalidRequest, match=r"-m pip install '.*\[otlp\]'"):
        options.start(TelemetryConfig(otlp="http://127.0.0.1:4318"), "laminar-test")


@pytest.mark.parametrize(
    "url", ["localhost:4318", "grpc://h:1", "http://", "http://h:0", "http://h:99999", "http://[", ""]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(Exception, match=r"is not a URL like http://127\.0\.0\.1:4318"):
        CollectorUrl().convert(url, None, None)


def test_credentials_do_not_stand_in_the_address() -> None:
    with pytest.raises(Exception, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        CollectorUrl().convert("http://user:secret@h:4318", None, None)
    assert "secret" not in str(refused.value)


@pytest.mark.slow
def test_off_means_that_no_sdk_of_traces_and_logs_is_imported() -> None:
    """What a daemon imports to start: as the contract in pyproject.toml has it, and as it is, others' imports too."""
    code = """
import sys
import gateway.app, gateway.cli, paramserver.cli, paramserver.daemon.process, paramserver.client, trainer_client
import gateway.engines.embedded.cli, agents_env.cli
banned = ("opentelemetry.sdk.trace", "opentelemetry.sdk._logs", "opentelemetry.exporter.otlp", "protos.telemetry.otlp")
print([name for name in sys.modules if name.startswith(banned)])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
