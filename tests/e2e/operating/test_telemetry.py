"""What real daemons export: the trace of a session, that of a version over relays to an engine, and JSON logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import processes
from tests.support.collector import Collector, SeenSpan, collecting
from tests.support.fleet import until
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.relays import Relays
from tests.support.scripted_engine import ScriptedEngine, in_thread
from tests.support.words import tokenizer
from trainer_client import Publisher

pytestmark = pytest.mark.slow

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT, CALL, TRAINER = "b7ad6b7169203331", "00f067aa0ba902b7", "53995c3f42cd8ad8"
WEIGHTS = {"w": np.ones(4, np.float32)}


def context(span: str, trace: str = TRACE, flags: str = "01") -> str:
    return f"00-{trace}-{span}-{flags}"


@contextmanager
def gateway(directory: Path, *flags: str) -> Iterator[Daemon]:
    command = ["gateway", "serve", "--model=policy", f"--tokenizer={tokenizer(directory / 'model')}", "--port=0"]
    daemon = processes.start("gateway", [*command, "--no-probe", "--poll-interval-s=0.2", *flags], directory)
    try:
        until(lambda: httpx.get(f"{daemon.ready['url']}/healthz").status_code == 200, "a serving engine")
        yield daemon
    finally:
        code = daemon.stop()
    assert code == 0, daemon.log()


def post(daemon: Daemon, path: str, body: dict[str, Any], traceparent: str = "") -> Any:
    headers = {"traceparent": traceparent} if traceparent else {}
    answer = httpx.post(f"{daemon.ready['url']}{path}", json=body, headers=headers, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer.json()


def turn(daemon: Daemon, path: str, prompt: int, traceparent: str = "") -> None:
    body = {"model": "policy", "prompt": [5, 6, prompt], "max_tokens": 4}
    post(daemon, f"{path}/v1/completions", body, traceparent)


def test_a_session_is_one_trace_below_its_clients(tmp_path: Path) -> None:
    flags = ("--trace-ratio=0", "--log-format=json")
    with collecting() as collector, in_thread(engine := ScriptedEngine("e0")) as url:
        with gateway(tmp_path, f"--engine=e0=vllm={url}", f"--otlp={collector.url}", *flags) as daemon:
            post(daemon, "/sessions", {"session_id": "s"}, context(CLIENT))
            turn(daemon, "/sessions/s", 7, context(CALL))
            turn(daemon, "/sessions/s", 8, context(CALL, trace="1" * 32))
            post(daemon, "/sessions/s/finish", {"reward": 1.0})
            turn(daemon, "", 9, context(CLIENT, trace="2" * 32))
            turn(daemon, "", 10, "00-malformed-01")
            turn(daemon, "", 11, context(CLIENT, trace="3" * 32, flags="00"))
        log = daemon.log()
    session = collector.one("session", session="s", turns=2)
    assert (session.trace_id, session.parent) == (TRACE, CLIENT)
    first, second = collector.named("turn", session="s")
    assert (first.trace_id, first.parent) == (TRACE, CALL), "below the call that it answers"
    assert (second.trace_id, second.parent, second.links) == (TRACE, session.span_id, (CALL,)), (
        "a foreign call is linked"
    )
    segments = collector.named("segment", session="s")
    assert [span.parent for span in segments] == [first.span_id, second.span_id]
    assert [request.traceparent for request in engine.requests[:2]] == [span.traceparent for span in segments]
    (alone,) = [span for span in collector.named("turn") if span.trace_id == "2" * 32]
    assert alone.parent == CLIENT, "a call without a session has no span of one"
    assert {span.trace_id for span in collector.spans} == {TRACE, "2" * 32}, "the ratio is 0, and one was not sampled"
    own, unsampled = (request.traceparent for request in engine.requests[3:])
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", own)
    assert unsampled.startswith(f"00-{'3' * 32}-")
    assert {span.service["service.name"] for span in collector.spans} == {"laminar-gateway"}
    assert {span.service["laminar.model"] for span in collector.spans} == {"policy"}
    assert collector.metrics["laminar_gateway_turns_completed"] == [({}, 5.0)]
    assert any("serving policy" in record.body for record in collector.logs)
    lines = [json.loads(line) for line in log.splitlines()]
    assert {line["model"] for line in lines} == {"policy"}
    assert "[5, 6, 7]" not in repr(collector.spans) + repr(collector.logs)


def test_a_version_is_one_trace_over_two_relays_to_an_engine(relays: Relays, tmp_path: Path) -> None:
    with collecting() as collector, in_thread(ScriptedEngine("e0")) as url:
        export = (f"--otlp={collector.url}", "--trace-ratio=1")
        a, b = (relays.start(name, *export) for name in ("a", "b"))
        engine = f"--engine=e0=vllm={url}@{b.ready['grpc']}"
        with gateway(tmp_path, engine, *export) as daemon, Publisher(a.ready["grpc"]) as publisher:
            publisher.publish(WEIGHTS, step=1, wait=2, traceparent=context(TRAINER))
            until(lambda: _version(daemon) == 1, "the first version in the engine")
            publisher.publish(WEIGHTS, step=2, wait=2)
            until(lambda: _version(daemon) == 2, "the second version in the engine")
        assert [a.stop(), b.stop()] == [0, 0], a.log() + b.log()
    for version, above in ((1, TRAINER), (2, "")):
        publish, fetch, load = _way_of(collector, version)
        assert len({publish.trace_id, fetch.trace_id, load.trace_id}) == 1
        assert publish.parent == above
        assert (fetch.parent, load.parent) == (publish.span_id, fetch.span_id)
        assert (publish.attributes["laminar.relay"], fetch.attributes["laminar.relay"]) == ("a", "b")
        assert (load.attributes["laminar.engine"], load.error) == ("e0", "")
    assert collector.one("publish", version=1).trace_id == TRACE
    assert {span.service["service.name"] for span in collector.spans} >= {"laminar-relay", "laminar-gateway"}
    assert {"a", "b"} <= {span.service.get("laminar.relay") for span in collector.spans}
    assert "laminar_relay_pool" in collector.metrics


def _way_of(collector: Collector, version: int) -> tuple[SeenSpan, SeenSpan, SeenSpan]:
    return (
        collector.one("publish", version=version),
        collector.one("fetch", version=version),
        collector.one("load", version=version),
    )


def _version(daemon: Daemon) -> int:
    (engine,) = httpx.get(f"{daemon.ready['url']}/status").json()["engines"]
    return int(engine["version"]) if engine["state"] == "serving" else -1


def test_a_collector_that_is_away_costs_no_request_and_few_lines(tmp_path: Path) -> None:
    with KeptPorts() as ports, in_thread(ScriptedEngine("e0")) as url:
        away = f"http://127.0.0.1:{ports.of('collector')}"
        flags = (f"--engine=e0=vllm={url}", f"--otlp={away}", "--trace-ratio=1")
        with gateway(tmp_path, *flags) as daemon:
            for prompt in range(20):
                turn(daemon, f"/sessions/s{prompt}", prompt)
        log = daemon.log()
    lines = [line for line in log.splitlines() if " opentelemetry." in line or " urllib3." in line]
    assert 1 <= len(lines) <= 8, log
    assert "Traceback" not in log, log
