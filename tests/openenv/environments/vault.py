"""An environment whose actions have several fields: two dials, each worth a half. It has room for one episode."""

from __future__ import annotations

from typing import Any, Literal

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Combination(Action):
    """Turns both dials."""

    letter: Literal["A", "B", "C"]
    number: int = Field(ge=0, le=9)


class Dials(Observation):
    told: str = ""
    tries: int = 0


class Vault(Environment[Combination, Dials, State]):
    SUPPORTS_CONCURRENT_SESSIONS = False

    def __init__(self) -> None:
        super().__init__()
        self._tries = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Dials:
        self._tries = 0
        return Dials(told="The number is 7; find the letter.")

    def step(self, action: Combination, timeout_s: float | None = None, **_: Any) -> Dials:
        if action.number == 0:
            raise RuntimeError("the vault is on fire")
        self._tries += 1
        right = (action.letter == "B") + (action.number == 7)
        return Dials(told=f"{right} right", tries=self._tries, reward=right / 2, done=right == 2)

    @property
    def state(self) -> State:
        return State(step_count=self._tries)
