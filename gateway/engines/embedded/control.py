"""The state of an engine that pause, resume and weight update sessions change: whether it admits and computes. Pure.

The rule behind the table: between the start of an update and its successful finish nothing is generated, and once a
weight was touched only a complete set of weights opens the fence again.

| state    | admits new requests | computes | left by |
|---|---|---|---|
| serving  | yes | yes | pause, start_weight_update, a failed reload |
| draining | no  | yes | the last running request's end, resume |
| paused   | `keep`: queues them; `abort`, `wait`: no | no | resume |
| updating | no  | no  | a successful finish (back to serving, or to the pause it began in) |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protos.errors import Conflict, Unavailable

PauseMode = Literal["abort", "wait", "keep"]
State = Literal["serving", "draining", "paused", "updating"]


class EnginePaused(Unavailable):
    """The engine is paused or being updated; a retry after it resumes may do."""

    code = "engine_paused"


@dataclass(slots=True)
class UpdateSession:
    received: bool = False
    """A complete set of weights was loaded."""


class Control:
    """The control state of one engine; every refusal names the call that is possible."""

    def __init__(self) -> None:
        self.pause_mode: PauseMode | None = None
        self.draining = False
        self.transfer_initialized = False
        self.session: UpdateSession | None = None
        self.dirty = False
        """Some weights are of one version and some of another."""

    @property
    def state(self) -> State:
        if self.session is not None or self.dirty:
            return "updating"
        if self.pause_mode is None:
            return "serving"
        return "draining" if self.draining else "paused"

    @property
    def computes(self) -> bool:
        return self.state in ("serving", "draining")

    def check_admission(self) -> None:
        """Raises EnginePaused unless a new request may enter (or queue, in a `keep` pause)."""
        state = self.state
        if state == "serving" or (state == "paused" and self.pause_mode == "keep"):
            return
        hint = "retry after a successful POST /finish_weight_update" if state == "updating" else "POST /resume first"
        raise EnginePaused(f"the engine is {state}", hint=hint)

    def pause(self, mode: PauseMode, *, idle: bool) -> None:
        self.pause_mode = mode
        self.draining = mode == "wait" and not idle

    def resume(self) -> None:
        """Conflict while an update is open: a half-loaded engine must not serve."""
        if self.state == "updating":
            raise Conflict("the engine is updating", hint="finish the weight update first")
        self.pause_mode, self.draining = None, False

    def init_transfer(self) -> None:
        self.transfer_initialized = True

    def start_update(self) -> None:
        if not self.transfer_initialized:
            raise Conflict("weight transfer is not initialized", hint="POST /init_weight_transfer_engine first")
        # A session left open by a load that failed, or by a gateway that died, is begun anew: the fence stays shut
        # all the while. (vLLM answers 500 here, and then only a restart helps.)
        self.session = UpdateSession()

    def check_session(self) -> None:
        if self.session is None:
            raise Conflict("no weight update is active", hint="POST /start_weight_update first")

    def touch(self) -> None:
        """The first weight is about to change."""
        self.dirty = True
        if self.session is not None:
            self.session.received = False

    def loaded(self) -> None:
        """Every weight is of the new version."""
        self.dirty = False
        if self.session is not None:
            self.session.received = True

    def finish_update(self, label: str | None, current: str) -> None:
        """Closes the session; refuses to label weights that never arrived."""
        self.check_session()
        assert self.session is not None
        if self.dirty:
            raise Conflict(
                "the last load failed halfway, so the weights are mixed",
                hint="POST /update_weights with a good snapshot (the previous version will do), then finish",
            )
        if not self.session.received and label not in (None, current):
            raise Conflict(
                f"no weights were received in this update, so {label!r} would be a false label",
                hint="POST /update_weights before the finish",
            )
        self.session = None
