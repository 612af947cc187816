"""Further players of a game: each is a session of its own at the gateway, beside the rollout's.

A seat is opened as the child of the rollout's session, which the gateway abandons when its parent ends. So a game that
breaks down leaves no session behind.
"""

from __future__ import annotations

from dataclasses import replace

from agents_env.environment import Chat, Outcome, outcome_of
from agents_env.runner.phases import Phases
from agents_env.server import Server, Session, SessionSpec


class GatewaySeats:
    """The `Seats` of one rollout, whose session was opened with `spec`."""

    def __init__(self, server: Server, spec: SessionSpec, phases: Phases) -> None:
        self._server = server
        self._spec = spec
        self._phases = phases
        self._taken: dict[str, Session] = {}

    async def take(self, name: str, *, version: int | None = None) -> Chat:
        """Raises RolloutFailed."""
        spec = replace(
            self._spec,
            session_id=f"{self._spec.session_id}-{name}",
            group_id=f"{self._spec.group_id}-{name}",
            tags={**self._spec.tags, "player": name},
            version=self._spec.version if version is None else version,
            train=version is None,
            parent_session_id=self._spec.session_id,
        )
        self._taken[name] = await self._server.open(spec)
        return self._phases.chat(self._server.chat(self._taken[name], self._phases.waits))

    async def leave(self, name: str, outcome: Outcome) -> None:
        """Raises RolloutFailed. A player that had no turn has no trajectory to reward: its session is abandoned."""
        outcome = outcome_of(outcome)
        session = self._taken.pop(name)
        if session.usage.turns:
            await self._server.finish(session, outcome)
        else:
            await self._server.abandon(session.session_id, "the game ended before its turn")
