"""How an answer's struct becomes the answer: the schema that is served is made from the same structs."""

from __future__ import annotations

import msgspec
from aiohttp import web


def answer_json(said: object, status: int = 200) -> web.Response:
    body = msgspec.json.encode(said)
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8")
