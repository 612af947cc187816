"""The routes of the dashboard: its page, which has no data and needs no key, and the feed, which needs a reader's."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from aiohttp import hdrs, web

from gateway.api.admin import number_in_query
from gateway.api.ui.feed import Feed
from protos.errors import NotFound, Unavailable

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
WRITE_TIMEOUT_S = 60.0
"""For a client to take one message; one that takes none for so long is gone."""
STREAM_S_MAX = 3600.0
"""Of one connection: then a client connects again, with a key that is still known."""
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Nothing from elsewhere, no code and no styles in the page itself, and no text that becomes markup: names come from
agents and engines. The page lies in no frame of another."""


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    content_type: str
    etag: str


def page_files(directory: Path = PAGE) -> dict[str, PageFile]:
    """By name. All of them are read now: what a request names is never a path."""
    return {path.name: _page_file(path) for path in sorted(directory.iterdir()) if path.suffix in TYPES}


def _page_file(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def add_ui_routes(app: web.Application, feed: Feed) -> None:
    handlers = _Handlers(feed, page_files())
    app.router.add_get("/ui", handlers.index)
    app.router.add_get("/ui/feed", handlers.feed, allow_head=False)
    app.router.add_get("/ui/{file}", handlers.file)
    app.on_shutdown.append(handlers.close)


class _Handlers:
    def __init__(self, feed: Feed, files: dict[str, PageFile]) -> None:
        self._feed, self._files = feed, files

    async def close(self, app: web.Application) -> None:
        await self._feed.close()

    async def index(self, request: web.Request) -> web.Response:
        return _answer(request, self._files[INDEX])

    async def file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info["file"])
        if found is None:
            raise NotFound(f"the dashboard has no file {request.match_info['file'][:100]!r}", hint="it is at /ui")
        return _answer(request, found)

    async def feed(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, without end unless `frames` says how many."""
        frames = number_in_query(request, "frames", 0)
        async with aclosing(self._feed.watch()) as messages:
            first = await anext(messages, None)  # before the response begins: its errors are error responses
            if first is None:
                raise Unavailable("the feed ended before its first message", hint="see the gateway's log")
            response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
            response.content_type = "text/event-stream"
            await response.prepare(request)
            await _send(request, response, first, messages, frames)
        return response


async def _send(
    request: web.Request,
    response: web.StreamResponse,
    message: bytes | None,
    messages: AsyncIterator[bytes],
    frames: int,
) -> None:
    """Sends `message` and those that follow, until the feed or the client ends, `STREAM_S_MAX` have passed, or
    `frames` were sent, if that is not 0."""
    loop, sent = asyncio.get_running_loop(), 0
    ends_at = loop.time() + STREAM_S_MAX
    try:
        while message is not None:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await response.write(message)
            sent += 1
            message = None if sent == frames or loop.time() > ends_at else await anext(messages, None)
    except ConnectionError:
        return  # the client is gone: nobody is left to notify
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # the end of the response would wait for the client, too


def _answer(request: web.Request, found: PageFile) -> web.Response:
    headers = {**SECURITY_HEADERS, hdrs.ETAG: found.etag}
    if request.headers.get(hdrs.IF_NONE_MATCH) == found.etag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, content_type=found.content_type, charset="utf-8", headers=headers)
