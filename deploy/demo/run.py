"""One run of the demo: set up, work, kill an engine and bring it back, shut down in order, tell how it went.

Invariants:
- the run ends: by the trainer's last step, by a process that failed, by the deadline, or by the user;
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
from deploy.demo.killing import choose_victim
from deploy.demo.plan import Plan
from deploy.demo.processes import DemoError, Exit, Supervisor
from deploy.demo.recording import GatewayStatus, Note, Recording, Step
from deploy.demo.screen import Progress
from deploy.demo.watching import Watchers

ROOT = Path(deploy.__file__).resolve().parent.parent
CHILD_ENV = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # more threads than cores: one that waits must not spin
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
DISPLAY_INTERVAL_S = 0.3
KILL_POLL_S = 0.1
AWAY_S = 4.0
"""How long the killed engine stays away: long enough to see the others carry its turns."""
STOP_TIMEOUT_S = 30.0
"""How long one group of processes may take to end after SIGTERM."""


class Interrupted(DemoError):
    """The user asked to stop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went. `problem` is None when the trainer did all its steps; `wall_s` is 0 when the set-up failed."""

    problem: str | None
    interrupted: bool
    exits: tuple[Exit, ...]
    zero_unix_s: float
    setup_s: float
    wall_s: float


class Run:
    """Owner of a run's processes and of what is seen of them."""

    def __init__(self, commands: Plan, recording: Recording, display: Display, stop: asyncio.Event) -> None:
        self._commands = commands
        self._settings = commands.settings
        self._recording = recording
        self._display = display
        self._stop = stop
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
            async with asyncio.timeout(self._settings.deadline_s):
                await self._race(processes, watchers, self._work(processes))
        except TimeoutError:
            raise DemoError(self._too_slow()) from None
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

    async def _work(self, processes: Supervisor) -> None:
        """Until the trainer has done its steps and the killed engine is back."""
        killing = asyncio.create_task(self._kill_one(processes))
        try:
            trained = asyncio.create_task(processes.wait("trainer"))
            await asyncio.wait({killing, trained}, return_when=asyncio.FIRST_COMPLETED)
            await trained
            if not any(exit.ending == "killed on purpose" for exit in processes.exits):
                raise DemoError("no engine was ever seen in mid-generation after a third of the steps; none was killed")
            await killing
        finally:
            killing.cancel()

    async def _kill_one(self, processes: Supervisor) -> None:
        """kill -9 to an engine in mid-generation, and a new process at the same address."""
        name, reason = await self._victim()
        port = int(str(processes.child(name).ready["url"]).rpartition(":")[2])
        self._note("kill", f"{name} killed on purpose (kill -9): {reason}", engine=name)
        await processes.kill(name)
        await asyncio.sleep(AWAY_S)
        self._note("restart", f"{name} is started again", engine=name)
        await processes.start(self._commands.engine(name, port))
        self._note("restart", f"{name} is up again", engine=name)

    async def _victim(self) -> tuple[str, str]:
        while True:
            status, steps_done = self._recording.last(GatewayStatus), len(self._recording.of(Step))
            choice = choose_victim(status, steps_done, self._settings.steps)
            if choice.engine is not None:
                return choice.engine, choice.reason
            await asyncio.sleep(KILL_POLL_S)

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
                    raise DemoError(f"{failed}. Its last words:\n{processes.child(failed.name).log_tail()}")
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
            deadline_s=self._settings.deadline_s,
            steps=self._settings.steps,
            relays=plan.RELAYS,
            zero_unix_s=self._zero_unix_s,
        )
        self._display.update(self._recording, progress)

    def _note(self, kind: str, text: str, engine: str = "") -> None:
        self._recording.add(Note(t=time.time(), kind=kind, text=text, engine=engine))

    def _too_slow(self) -> str:
        done = len(self._recording.of(Step))
        return (
            f"{done} of {self._settings.steps} steps were done in {self._settings.deadline_s:.0f} s: this machine is "
            "slower than two free cores, or busy. Free it, or ask for fewer steps (--steps)"
        )


async def shut_down(processes: Supervisor, watchers: Watchers) -> None:
    """Ends everything, consumers first.

    1 environments: they finish or abandon what they roll out
    2 trainer: it has ended by itself unless the run was cut short
    3 a last look at what the gateway and the trainer have to tell
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
