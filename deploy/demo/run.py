"""One run of the demo: set up, work, kill an engine and restart it, shut down in order, return the outcome.

Invariants:
- the run ends: with the trainer's last step, with a process that failed, when nothing progresses, or by the user;
- it has time for as many steps as fit (`pace`), and no deadline: a slow machine is no fault;
- however it ends, every process is ended in the order of `shut_down`, and its exit status is part of the outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deploy
from deploy.demo import plan
from deploy.demo.display import Display
from deploy.demo.plan import Plan
from deploy.demo.processes import DemoError, Exit, Supervisor
from deploy.demo.recording import GatewayStatus, Note, Recording, Step, StepProgress
from deploy.demo.screen import Progress
from deploy.demo.victim import Choice, choose_victim
from deploy.demo.watchers import Watchers

ROOT = Path(deploy.__file__).resolve().parent.parent
CHILD_ENV = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # more threads than cores: one that waits must not spin
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
DISPLAY_INTERVAL_S = 0.3
KILL_POLL_S = 0.2
KILLS_MAX = 3
"""Turns may end between the status and the kill: then none was cut, and another engine is killed."""
KILL_GRACE_S = 60.0
"""How long the run waits, after the trainer's last step, for an engine that has turns to cut."""
CUT_SEEN_S = 10.0
"""How long a cut may take to appear in the gateway's counters."""
STALL_S = 300.0
"""A run in which no token, trajectory or part of a training step came for so long is stalled, however slow it is."""
STALL_POLL_S = 1.0
AWAY_S = 4.0
"""How long the killed engine stays away: long enough to see the others carry its turns."""
STOP_TIMEOUT_S = 30.0
"""How long one group of processes may take to end after SIGTERM."""


class Interrupted(DemoError):
    """The user stopped the run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went. `problem` is None when the trainer ended well; `wall_s` is 0 when the set-up failed."""

    problem: str | None
    interrupted: bool
    exits: tuple[Exit, ...]
    zero_unix_s: float
    setup_s: float
    wall_s: float


class Run:
    """The owner of a run's processes and of its recording."""

    def __init__(self, commands: Plan, recording: Recording, display: Display, stop: asyncio.Event) -> None:
        self._commands = commands
        self._settings = commands.settings
        self._recording = recording
        self._display = display
        self._stop = stop
        self._enough = asyncio.Event()  # no further engine is to be killed
        self._phase = "starting"
        self._zero_unix_s = time.time()
        self._setup_s = 0.0
        self._wall_s = 0.0

    async def run(self) -> Outcome:
        problem: DemoError | None = None
        watchers = Watchers(self._recording, plan.MODEL)
        supervisor = Supervisor(self._settings.logs, cwd=ROOT, env=CHILD_ENV)
        with self._display:
            async with supervisor as processes, watchers:
                showing = asyncio.create_task(self._keep_showing())
                try:
                    await self._set_up_and_work(processes, watchers)
                except DemoError as error:
                    problem = error
                    self._note("warning", str(error).splitlines()[0])
                self._phase = "shutting down"
                await shut_down(processes, watchers)
                showing.cancel()
                self._show()
        return Outcome(
            problem=None if problem is None else str(problem),
            interrupted=isinstance(problem, Interrupted),
            exits=tuple(processes.exits),
            zero_unix_s=self._zero_unix_s,
            setup_s=self._setup_s,
            wall_s=self._wall_s,
        )

    async def _set_up_and_work(self, processes: Supervisor, watchers: Watchers) -> None:
        began = time.monotonic()
        await self._race(processes, watchers, self._set_up(processes, watchers))
        self._setup_s, self._zero_unix_s = time.monotonic() - began, time.time()
        self._note("phase", f"set-up took {self._setup_s:.1f} s; the run begins")
        self._phase = "training"
        began = time.monotonic()
        try:
            await self._race(processes, watchers, self._work(processes, watchers))
        finally:
            self._wall_s = time.monotonic() - began

    async def _set_up(self, processes: Supervisor, watchers: Watchers) -> None:
        """etcd, relays, engines, gateway, trainer (whose first version goes out), environments."""
        commands = self._commands
        self._phase = "starting etcd and the relays"
        etcd = await processes.start(commands.etcd())
        ready = await processes.start_all(commands.relay(name, etcd.ready["etcd"]) for name in plan.RELAYS)
        relays = {name: str(ready[name]["grpc"]) for name in plan.RELAYS}
        await watchers.relays(relays)
        self._phase = "starting the engines"
        ready = await processes.start_all(commands.engine(name) for name in plan.ENGINES)
        engines = {name: str(ready[name]["url"]) for name in plan.ENGINES}
        self._phase = "starting the gateway and the trainer"
        gateway = await processes.start(commands.gateway(engines, list(relays.values())))
        url = str(gateway.ready["url"])
        await watchers.gateway(url)
        watchers.trainer(self._settings.trainer_events)
        await processes.start(commands.trainer(relays[plan.RELAYS[0]], url))
        await processes.start_all(commands.runner(environment, url) for environment in plan.ENVIRONMENTS)

    async def _work(self, processes: Supervisor, watchers: Watchers) -> None:
        """Until the trainer has done its steps and the killed engine is back."""
        began = time.monotonic()
        killing = asyncio.create_task(self._cut_turns(processes, watchers, began))
        trained = asyncio.create_task(processes.wait("trainer"))
        stalled = asyncio.create_task(self._stalled())
        try:
            await asyncio.wait({killing, trained, stalled}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({trained, stalled}, return_when=asyncio.FIRST_COMPLETED)
            if not trained.done():
                raise DemoError(stalled.result())
            trained.result()
            await self._await_kill(killing, processes)
        finally:
            for task in (killing, trained, stalled):
                task.cancel()
            await asyncio.gather(killing, trained, stalled, return_exceptions=True)

    async def _await_kill(self, killing: asyncio.Task[None], processes: Supervisor) -> None:
        """Waits until a killed engine is back, and for some time until one can be killed: agents continue meanwhile."""
        await asyncio.wait({killing}, timeout=KILL_GRACE_S)
        self._enough.set()
        await killing
        if not any(exit.ending == "killed on purpose" for exit in processes.exits):
            raise DemoError("no engine was ever seen in mid-generation beside another one; none was killed")

    async def _cut_turns(self, processes: Supervisor, watchers: Watchers, began: float) -> None:
        """Kills an engine in mid-generation and brings it back; once more if no turn was cut by that."""
        before = self._turns_cut()
        for _ in range(KILLS_MAX):
            victim = await self._victim(watchers, began)
            if victim is None:
                return
            await self._kill(*victim, processes)
            if await self._cut_since(before, watchers):
                return
            self._note("kill", "no turn was cut by that: they had all just ended; another engine will be killed")

    async def _kill(self, name: str, reason: str, processes: Supervisor) -> None:
        """kill -9 to an engine in mid-generation, and a new process at the same address."""
        port = int(str(processes.child(name).ready["url"]).rpartition(":")[2])
        self._note("kill", f"{name} killed on purpose (kill -9): {reason}", engine=name)
        await processes.kill(name)
        await asyncio.sleep(AWAY_S)
        self._note("restart", f"{name} is started again", engine=name)
        await processes.start(self._commands.engine(name, port))
        self._note("restart", f"{name} is up again", engine=name)

    async def _victim(self, watchers: Watchers, began: float) -> tuple[str, str] | None:
        """The engine to kill, once it is time, and the reason; None when it is too late."""
        while not self._enough.is_set():
            used = (time.monotonic() - began) / self._settings.budget_s
            if self._choose_victim(used).engine is not None:
                await watchers.look()  # the last status may be half a second old, and a turn may have ended since
                choice = self._choose_victim(used)
                if choice.engine is not None:
                    return choice.engine, choice.reason
            await asyncio.sleep(KILL_POLL_S)
        return None

    def _choose_victim(self, budget_used: float) -> Choice:
        steps_done, status = len(self._recording.of(Step)), self._recording.last(GatewayStatus)
        return choose_victim(status, steps_done, self._settings.steps, budget_used)

    async def _cut_since(self, before: int, watchers: Watchers) -> bool:
        """Whether the gateway has counted more cut turns than `before`, within CUT_SEEN_S."""
        until = time.monotonic() + CUT_SEEN_S
        while time.monotonic() < until:
            await watchers.look()
            if self._turns_cut() > before:
                return True
            await asyncio.sleep(KILL_POLL_S)
        return False

    def _turns_cut(self) -> int:
        return (self._recording.last(GatewayStatus) or GatewayStatus()).counter("turns_cut")

    async def _stalled(self) -> str:
        """Returns a description once nothing has progressed for `STALL_S`."""
        seen, since = self._how_far(), time.monotonic()
        while time.monotonic() - since < STALL_S:
            await asyncio.sleep(STALL_POLL_S)
            now = self._how_far()
            if now != seen:
                seen, since = now, time.monotonic()
        steps, _, tokens, trajectories = seen
        return (
            f"no progress for {STALL_S:.0f} s, after {steps} training steps, {tokens} tokens and {trajectories} "
            "trajectories: see the logs of the trainer and of the gateway"
        )

    def _how_far(self) -> tuple[int, StepProgress | None, int, int]:
        """(steps, progress within one, tokens generated, trajectories finished): while work goes on, one changes."""
        status = self._recording.last(GatewayStatus) or GatewayStatus()
        counts = (status.counter("tokens_generated"), status.counter("trajectories_finished"))
        return len(self._recording.of(Step)), self._recording.last(StepProgress), *counts

    async def _race(self, processes: Supervisor, watchers: Watchers, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` unless the user, a process that fails, or a watcher that fails ends it first."""
        main = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        failure = asyncio.create_task(processes.failure())
        try:
            while not main.done():
                await asyncio.wait({main, stop, failure, *watchers.tasks}, return_when=asyncio.FIRST_COMPLETED)
                if stop.done():
                    raise Interrupted("stopped on request")
                if failure.done() and not main.done():
                    failed = failure.result()
                    raise DemoError(f"{failed}. The end of its log:\n{processes.child(failed.name).log_tail()}")
                for watcher in watchers.tasks:
                    if watcher.done():
                        watcher.result()
            main.result()
        finally:
            for task in (main, stop, failure):
                task.cancel()
            await asyncio.gather(main, stop, failure, return_exceptions=True)

    async def _keep_showing(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(DISPLAY_INTERVAL_S)

    def _show(self) -> None:
        progress = Progress(
            phase=self._phase,
            seconds=time.time() - self._zero_unix_s,
            budget_s=self._settings.budget_s,
            steps=self._settings.steps,
            relays=plan.RELAYS,
            zero_unix_s=self._zero_unix_s,
        )
        self._display.update(self._recording, progress)

    def _note(self, kind: str, text: str, engine: str = "") -> None:
        self._recording.add(Note(t=time.time(), kind=kind, text=text, engine=engine))


async def shut_down(processes: Supervisor, watchers: Watchers) -> None:
    """Ends everything, consumers first.

    1 environments: they finish or abandon what they roll out
    2 trainer: it has ended by itself unless the run was cut short
    3 the last status and events of the gateway and the trainer are read
    4 gateway
    5 engines
    6 relays
    7 etcd
    """
    await processes.stop_all([f"agents-{name}" for name in plan.ENVIRONMENTS], STOP_TIMEOUT_S)
    await processes.stop_all(["trainer"], STOP_TIMEOUT_S)
    await watchers.last_look()
    await processes.stop_all(["gateway"], STOP_TIMEOUT_S)
    await processes.stop_all(plan.ENGINES, STOP_TIMEOUT_S)
    await processes.stop_all(plan.RELAYS, STOP_TIMEOUT_S)
    await processes.stop_all(["etcd"], STOP_TIMEOUT_S)
