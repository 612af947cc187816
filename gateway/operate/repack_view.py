"""The requests of `gateway repack` and `gateway status` to a running gateway, and the output of the former."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from protos.access.bearer import KEY_HINT, bearer
from protos.access.unix_socket import socket_path
from protos.engines import is_address
from protos.errors import Forbidden, InvalidRequest, Unauthenticated, Unavailable

DEADLINE_S = 10.0
LOOK_S = 0.5
"""Between two requests to a gateway that does not serve yet."""


async def request_plans(url: str, *, dry_run: bool) -> dict[str, Any]:
    """The plans, as `/admin/repack` gives them. Raises Unavailable."""
    return await call("GET" if dry_run else "POST", url, "/admin/repack")


async def wait_for_engines(url: str, wait_s: float, engines_min: int = 1) -> dict[str, Any]:
    """The gateway's status once so many of its engines serve. Raises Unavailable when `wait_s` pass before that."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            answer = await call("GET", url, "/status")
        except Unavailable:
            if time.monotonic() > deadline:
                raise
        else:
            states = {engine["name"]: engine["state"] for engine in answer["engines"]}
            if [*states.values()].count("serving") >= engines_min:
                return answer
            if time.monotonic() > deadline:
                seen = ", ".join(f"{name} is {state}" for name, state in sorted(states.items())) or "it has none"
                few = "no engine of" if engines_min == 1 else f"fewer than {engines_min} engines of"
                raise Unavailable(
                    f"{few} {url} serve{'s' * (engines_min == 1)} after {wait_s:g} s: {seen}",
                    hint="see the engine's log",
                )
        await asyncio.sleep(LOOK_S)


async def call(method: str, url: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The gateway's answer; the API key is that of LAMINAR_API_KEY. Raises Unavailable, InvalidRequest, Unauthenticated
    and Forbidden."""
    at = socket_path(url)
    if at is None and not is_address(url):
        raise InvalidRequest(
            f"--url {url!r} is no gateway's address", hint="such as http://127.0.0.1:8080, or unix:PATH of a socket"
        )
    root = url.rstrip("/") if at is None else "http://gateway"
    try:
        async with asyncio.timeout(DEADLINE_S), client(at) as http:
            response = await http.request(method, root + path, json=body)
        if response.status_code in (401, 403):
            raise refused(response.status_code, response.json()["error"]["message"])
        if not response.is_success:
            raise ValueError(f"{response.status_code} {response.reason_phrase}")
        answer: dict[str, Any] = response.json()
        return answer
    except (httpx.RemoteProtocolError, ValueError, KeyError, TypeError) as e:
        raise Unavailable(f"what answers at {url} is no gateway: {e}", hint="name one with --url") from e
    except (httpx.TransportError, TimeoutError) as e:
        raise Unavailable(f"no gateway answers at {url}: {why_unreachable(e)}", hint="name one with --url") from e


def client(at: Path | None = None, timeout: httpx.Timeout | None = None) -> httpx.AsyncClient:
    """With the key of LAMINAR_API_KEY. `at`: a unix socket. Never by a proxy; but SSL_CERT_FILE counts."""
    transport = httpx.AsyncHTTPTransport(
        uds=None if at is None else str(at), verify=httpx.create_ssl_context(), trust_env=False
    )
    return httpx.AsyncClient(headers=bearer(), transport=transport, timeout=timeout)


def refused(status: int, message: str) -> Unauthenticated | Forbidden:
    return Unauthenticated(message, hint=KEY_HINT) if status == 401 else Forbidden(message)


def why_unreachable(error: Exception) -> str:
    """The reason of the operating system, before which stand the classes of httpx and of its transport."""
    of: BaseException | None = error
    while of is not None:
        number = of.errno if isinstance(of, OSError) else None
        if number is not None and number in errno.errorcode:  # the resolver has numbers of its own
            return os.strerror(number)
        of = of.__cause__ or of.__context__
    return str(error) or type(error).__name__


def describe(answer: Mapping[str, Any], *, dry_run: bool) -> Sequence[str]:
    """For people: each version's plan, its price and gain, and the reason for every engine."""
    if not answer["plans"]:
        return ["nothing to pack: no version behind the newest is on more than one engine"]
    return [line for plan in answer["plans"] for line in _plan_lines(plan, dry_run)]


def _plan_lines(plan: Mapping[str, Any], dry_run: bool) -> list[str]:
    would = "would free" if dry_run else "frees"
    freed = ", ".join(freed["engine"] for freed in plan["freed"]) or "no engine"
    head = f"version {plan['version']}: {would} {freed}"
    if plan["freed"]:
        head += f" by {len(plan['moves'])} moves, for {plan['price_s']:.2f} s of prefill against {plan['gain_s']:.2f} s"
    return [head, *(f"  {reason}" for reason in plan["reasons"])]
