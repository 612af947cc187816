"""The gateway's path as most gateways for agents build it: httpx towards engines, an ASGI application on uvicorn.

Runs in the peers' environment. It does less than the gateway (no sessions, no pool on disk, no versions, no resuming):
least-loaded engine, ids and logprobs of every event recorded, text from ids, answers as a whole or as events.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import httpx
import uvicorn

Scope = dict[str, Any]
EVENT = {"id": "cmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "policy"}


class Gateway:
    """An ASGI application."""

    def __init__(self, engines: list[str], vocabulary: list[str]) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits)
        self._running = dict.fromkeys(engines, 0)
        self._vocabulary = vocabulary

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = json.loads(await _read(receive))
        engine = min(self._running, key=self._running.__getitem__)
        self._running[engine] += 1
        try:
            await self._answer(engine, body, send)
        finally:
            self._running[engine] -= 1

    async def _answer(self, engine: str, body: dict[str, Any], send: Any) -> None:
        text = body["prompt"] if "prompt" in body else "".join(str(m["content"]) for m in body["messages"])
        prompt = [300 + ord(c) % 64 for c in text[::4]]  # stands for a tokenizer
        asked = {"model": "policy", "prompt": prompt, "max_tokens": body.get("max_tokens", 16), "stream": True}
        asked |= {"logprobs": 0, "return_token_ids": True, "stream_interval": body.get("stream_interval", 1)}
        stream, ids, logprobs, texts = bool(body.get("stream")), [], [], []
        if stream:
            await _start(send, "text/event-stream")
        async with self._client.stream("POST", f"{engine}/v1/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                ids += choice["token_ids"]
                logprobs += choice["logprobs"]["token_logprobs"]
                text = "".join(self._vocabulary[i] for i in choice["token_ids"])
                texts.append(text)
                if stream:
                    said = {"index": 0, "delta": {"content": text}, "finish_reason": choice["finish_reason"]}
                    await _more(send, b"data: " + json.dumps({**EVENT, "choices": [said]}).encode() + b"\n\n")
        if stream:
            await _more(send, b"data: [DONE]\n\n", last=True)
            return
        message = {"role": "assistant", "content": "".join(texts)}
        answer = {**EVENT, "choices": [{"index": 0, "message": message, "finish_reason": "length"}]}
        await _start(send, "application/json")
        await _more(send, json.dumps(answer).encode(), last=True)


async def _read(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _start(send: Any, kind: str) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})


async def _more(send: Any, data: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--vocabulary", required=True)
    parser.add_argument("engines", nargs="+")
    arguments = parser.parse_args()
    with open(arguments.vocabulary) as file:
        vocabulary = json.load(file)
    app = Gateway(arguments.engines, vocabulary)
    uvicorn.run(app, port=arguments.port, log_level="warning", access_log=False, loop="uvloop", http="httptools")


if __name__ == "__main__":
    main()
