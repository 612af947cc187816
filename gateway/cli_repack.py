"""What `gateway repack` and `gateway status` ask a running gateway, and how the former tells the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from protos.engines import is_address
from protos.errors import InvalidRequest, Unavailable

DEADLINE_S = 10.0


async def ask(url: str, *, dry_run: bool) -> dict[str, Any]:
    """The plans, as `/admin/repack` gives them. Raises Unavailable."""
    return await call("GET" if dry_run else "POST", url, "/admin/repack")


async def call(method: str, url: str, path: str) -> dict[str, Any]:
    """Raises Unavailable, InvalidRequest."""
    if not is_address(url):
        raise InvalidRequest(f"--url {url!r} is no gateway's address", hint="such as http://127.0.0.1:8080")
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as http,
            http.request(method, url.rstrip("/") + path) as response,
        ):
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer
    except (aiohttp.ClientResponseError, ValueError) as e:
        raise Unavailable(f"what answers at {url} is no gateway: {e}", hint="name one with --url") from e
    except (aiohttp.ClientError, TimeoutError) as e:
        raise Unavailable(f"no gateway answers at {url}: {e or type(e).__name__}", hint="name one with --url") from e


def told(answer: Mapping[str, Any], *, dry_run: bool) -> str:
    """For people: each version's plan, its price and gain, and the reason for every engine."""
    if not answer["plans"]:
        return "nothing to pack: no version behind the newest is on more than one engine"
    return "\n".join(line for plan in answer["plans"] for line in _plan_lines(plan, dry_run))


def _plan_lines(plan: Mapping[str, Any], dry_run: bool) -> list[str]:
    would = "would free" if dry_run else "frees"
    freed = ", ".join(freed["engine"] for freed in plan["freed"]) or "no engine"
    head = f"version {plan['version']}: {would} {freed}"
    if plan["freed"]:
        head += f" by {len(plan['moves'])} moves, for {plan['price_s']:.2f} s of prefill against {plan['gain_s']:.2f} s"
    return [head, *(f"  {reason}" for reason in plan["reasons"])]
