"""A relay's health: by gRPC's own protocol, and by HTTP for who has no certificate of the fleet, as kubelet has none.

Invariants:
- a relay serves as long as it is the member of its name: whoever took the name is to be used instead;
- a relay lives as long as its loop goes round; what answers by HTTP is a thread of its own, which would never notice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from grpc_health.v1 import health, health_pb2

HEALTH_S = 1.0
"""Between two reports."""
STUCK_S = 20.0
"""Without a report: the loop is not slow, it stands still."""
LIVE_PATH, SERVING_PATH = "/livez", "/healthz"


class Health:
    """What was reported last. Reported on the loop, read by any thread."""

    def __init__(self) -> None:
        self._last = (time.monotonic(), True)

    def report(self, *, serving: bool) -> None:
        self._last = (time.monotonic(), serving)

    def trouble(self, path: str, now: float) -> str:
        """Why `path` is answered with an error; empty while all is well."""
        at, serving = self._last
        if now - at > STUCK_S:
            return f"the relay has stood still for {now - at:.0f} s"
        return "" if serving or path == LIVE_PATH else "another relay has taken its name"


async def report_health(
    health_checks: health.aio.HealthServicer, service: str, found: Health, name_taken: Callable[[], bool]
) -> None:
    """Reports for as long as it runs."""
    statuses = health_pb2.HealthCheckResponse
    while True:
        serving = not name_taken()
        found.report(serving=serving)
        await health_checks.set(service, statuses.SERVING if serving else statuses.NOT_SERVING)
        await asyncio.sleep(HEALTH_S)


def with_health(metrics: WSGIApplication, found: Health) -> WSGIApplication:
    """`metrics` with the two paths of health before it: 200, or 503 with the reason."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in (LIVE_PATH, SERVING_PATH):
            return metrics(environ, start_response)
        trouble = found.trouble(path, time.monotonic())
        start_response("503 Service Unavailable" if trouble else "200 OK", [("Content-Type", "text/plain")])
        return [f"{trouble or 'ok'}\n".encode()]

    return answer
