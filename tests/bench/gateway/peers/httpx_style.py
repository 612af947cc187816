"""The gateway's relaying of text as most gateways for agents build it: httpx towards engines, an ASGI app on uvicorn.

Runs in the peers' environment. It does what the gateway does for such a call: a look at the body for the model and
`stream`, the least loaded engine, the body as it is, the answer's bytes as they come, and the version in a header.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import httpx
import uvicorn

Scope = dict[str, Any]


class Gateway:
    """An ASGI application."""

    def __init__(self, engines: list[str]) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits)
        self._running = dict.fromkeys(engines, 0)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await _read(receive)
        seen = json.loads(body)
        if seen["model"] != "policy":
            await _start(send, 404, "application/json")
            await _more(send, b'{"error": {"message": "no such model"}}', last=True)
            return
        engine = min(self._running, key=self._running.__getitem__)
        self._running[engine] += 1
        try:
            await (self._stream if seen.get("stream") else self._whole)(f"{engine}{scope['path']}", body, send)
        finally:
            self._running[engine] -= 1

    async def _whole(self, url: str, body: bytes, send: Any) -> None:
        answer = await self._client.post(url, content=body, headers={"Content-Type": "application/json"})
        await _start(send, answer.status_code, answer.headers["content-type"])
        await _more(send, answer.content, last=True)

    async def _stream(self, url: str, body: bytes, send: Any) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._client.stream("POST", url, content=body, headers=headers) as answer:
            await _start(send, answer.status_code, answer.headers["content-type"])
            async for piece in answer.aiter_raw():
                await _more(send, piece)
        await _more(send, b"", last=True)


async def _read(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _start(send: Any, status: int, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"x-laminar-weight-version", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _more(send: Any, data: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("engines", nargs="+")
    arguments = parser.parse_args()
    app = Gateway(arguments.engines)
    uvicorn.run(app, port=arguments.port, log_level="warning", access_log=False, loop="uvloop", http="httptools")


if __name__ == "__main__":
    main()
