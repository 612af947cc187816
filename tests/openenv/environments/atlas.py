"""An environment of tools, over MCP: look a capital up, then say it. A right answer is worth 1, and any ends it."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import Action, Observation, State

CAPITALS = [("Ruritania", "Strelsau"), ("Freedonia", "Glenn"), ("Genovia", "Pyrus"), ("Latveria", "Doomstadt")]


class Atlas(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("atlas")
        capitals = dict(CAPITALS)

        @tools.tool
        def capital(country: str) -> str:
            """The capital of a country."""
            return capitals[country]

        @tools.tool
        def answer(city: str) -> str:
            """Gives the answer."""
            return "noted"

        super().__init__(tools)
        self._capital = ""
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        country, self._capital = CAPITALS[(seed or 0) % len(CAPITALS)]
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(metadata={"question": f"What is the capital of {country}?"})

    async def step_async(self, action: Action, timeout_s: float | None = None, **named: Any) -> Observation:
        self._state.step_count += 1
        seen = await super().step_async(action, timeout_s=timeout_s, **named)
        if isinstance(action, CallToolAction) and action.tool_name == "answer":
            seen.reward = float(action.arguments.get("city") == self._capital)
            seen.done = True
        return seen

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(metadata={"error": "only tools"})

    @property
    def state(self) -> State:
        return self._state
