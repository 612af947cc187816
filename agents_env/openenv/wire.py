"""One episode on an OpenEnv server, over its WebSocket: `/ws`, one environment for each connection.

Invariants:
- one request is under way at a time; the server answers them in order;
- an action whose form the server refuses is `BadAction`, which the model may mend; anything else that it refuses, and
  a connection that breaks, are failures of the environment;
- a server whose environments are all taken is waited for: the rollout's phase `reset` bounds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from agents_env.environment import Tool
from agents_env.failures import RolloutFailed

log = logging.getLogger("agents-env")

MESSAGE_BYTES_MAX = 64 << 20
"""Of one observation."""
FULL_PAUSE_S = 0.5
"""Between two attempts at a server whose environments are all taken: it gives no sign when one is free."""
SCHEMA_TIMEOUT_S = 60.0


class BadAction(Exception):
    """The server refused the action's form; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answered. `reward` None: it gave none."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


async def action_schema(server: str) -> Mapping[str, Any]:
    """The JSON schema of the environment's actions. Raises RolloutFailed."""
    try:
        async with httpx.AsyncClient(timeout=SCHEMA_TIMEOUT_S, trust_env=False) as http:
            answer = (await http.get(f"{server}/schema")).raise_for_status().json()
        return dict(answer["action"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise _failed(
            type(error).__name__, f"{server}/schema does not answer as OpenEnv's servers do: {error}"
        ) from error


@contextlib.asynccontextmanager
async def episode(server: str) -> AsyncIterator[Episode]:
    """A connection, and with it an environment of its own, which ends with it. Raises RolloutFailed."""
    url = "ws" + server.removeprefix("http") + "/ws"
    try:
        async with connect(url, max_size=MESSAGE_BYTES_MAX, proxy=None) as connection:
            yield Episode(connection)
    except (WebSocketException, OSError) as error:
        raise _failed(type(error).__name__, f"{url}: {error or 'the connection broke'}") from error


class Full(Exception):
    """The server has as many environments as it may have."""


class Episode:
    """The requests of one connection. Each raises RolloutFailed, and WebSocketException if the connection breaks."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def reset(self, arguments: Mapping[str, Any]) -> Step:
        """Raises Full."""
        return await self._step({"type": "reset", "data": dict(arguments)})

    async def step(self, action: Mapping[str, Any]) -> Step:
        """Raises BadAction."""
        return await self._step({"type": "step", "data": dict(action)})

    async def tools(self) -> Sequence[Tool]:
        """The tools of an environment whose actions are calls over MCP."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        answer = await self._ask({"type": "mcp", "data": request})
        try:
            found = answer["result"]["tools"]
            return [Tool(tool["name"], tool.get("description") or "", _parameters(tool)) for tool in found]
        except (KeyError, TypeError) as error:
            raise _failed("tools", f"tools/list was answered with {json.dumps(answer)[:200]}") from error

    async def _step(self, message: Mapping[str, Any]) -> Step:
        answer = await self._ask(message)
        try:
            reward = answer.get("reward")
            return Step(dict(answer["observation"]), None if reward is None else float(reward), bool(answer["done"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _failed("observation", f"no observation of OpenEnv: {type(error).__name__}: {error}") from error

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        with contextlib.suppress(ConnectionClosed):  # what the server said before it closed is still to be read
            await self._connection.send(json.dumps(message))
        try:
            answer = json.loads(await self._connection.recv())
            kind, data = answer["type"], answer["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise _failed("answer", f"no message of OpenEnv: {type(error).__name__}: {error}") from error
        if kind != "error":
            return dict(data)
        code, text = str(data.get("code")), str(data.get("message"))
        if code == "CAPACITY_REACHED":
            raise Full(text)
        if code == "VALIDATION_ERROR" and message["type"] == "step":
            raise BadAction(_faults(data) or text)
        raise _failed(code, f"{message['type']}: {text}")


async def reset_when_free(
    server: str, arguments: Mapping[str, Any], stack: contextlib.AsyncExitStack
) -> tuple[Episode, Step]:
    """A new episode and its first observation, once the server has room; `stack` ends it."""
    waited = False
    while True:
        async with contextlib.AsyncExitStack() as attempt:
            begun = await attempt.enter_async_context(episode(server))
            try:
                first = await begun.reset(arguments)
            except Full as error:
                log.log(logging.DEBUG if waited else logging.INFO, "%s is full and waited for: %s", server, error)
                waited = True
            else:
                stack.push_async_exit(attempt.pop_all())
                return begun, first
        await asyncio.sleep(FULL_PAUSE_S)


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}})


def _faults(data: Mapping[str, Any]) -> str:
    """What is wrong with each field, as the server's model of the action has it."""
    faults = data.get("errors") or ()
    return "; ".join(f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg')}" for fault in faults)


def _failed(kind: str, message: str) -> RolloutFailed:
    return RolloutFailed("environment", kind, message)
