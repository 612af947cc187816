"""What a relay's port of metrics says of its health, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from grpc_health.v1 import health, health_pb2

from paramserver.daemon.health import HEALTH_S, LIVE_PATH, SERVING_PATH, STUCK_S, Health, report_health, with_health
from tests.support.relays import until

SERVICE = "a.Service"


def metrics(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b"metrics"]


def answer(found: Health, path: str) -> tuple[str, str]:
    statuses: list[str] = []
    body = with_health(metrics, found)({"PATH_INFO": path}, lambda status, headers: statuses.append(status))  # type: ignore[arg-type]
    return statuses[0].partition(" ")[0], b"".join(body).decode()


def test_a_relay_that_serves_is_well_and_other_paths_are_metrics() -> None:
    found = Health()
    assert [answer(found, path) for path in (LIVE_PATH, SERVING_PATH)] == [("200", "ok\n")] * 2
    assert answer(found, "/metrics") == ("200", "metrics")


def test_a_relay_without_its_name_lives_and_serves_nobody() -> None:
    found = Health()
    found.report(serving=False)
    assert answer(found, LIVE_PATH)[0] == "200"
    assert answer(found, SERVING_PATH) == ("503", "another relay has taken its name\n")


def test_a_relay_whose_loop_stands_still_is_not_alive() -> None:
    found = Health()
    for path in (LIVE_PATH, SERVING_PATH):
        assert found.trouble(path, time.monotonic() + STUCK_S - 1) == ""
        assert "stood still" in found.trouble(path, time.monotonic() + STUCK_S + 1)
    assert STUCK_S > 5 * HEALTH_S, "a machine that stands still for some seconds is no reason for a restart"


async def test_grpc_and_http_report_the_same() -> None:
    checks, found, taken = health.aio.HealthServicer(), Health(), False
    await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
    reporting = asyncio.create_task(report_health(checks, SERVICE, found, lambda: taken))

    async def serves(expected: int) -> bool:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        return bool((await checks.Check(request, None)).status == expected)

    await until(lambda: serves(health_pb2.HealthCheckResponse.SERVING), "a first report")
    assert answer(found, SERVING_PATH)[0] == "200"
    taken = True
    await until(lambda: serves(health_pb2.HealthCheckResponse.NOT_SERVING), "that its name was taken")
    assert answer(found, SERVING_PATH)[0] == "503"
    reporting.cancel()
    await asyncio.wait([reporting])
