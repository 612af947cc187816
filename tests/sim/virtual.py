"""Virtual time: processes that are event loops of their own, in one thread, on one clock.

Invariants:
- nothing here knows the time of day: a run is a function of its seed (and of the order of sets: PYTHONHASHSEED);
- a process is one loop. One that is stopped is not stepped, as under SIGSTOP; one that is killed never runs again;
- whatever leaves a process passes through `World`-side events, so nothing leaves one that is dead.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import functools
import heapq
import inspect
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any


class Clock:
    """Seconds since the world began, and what is going to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self.processes: list[Process] = []

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.now + delay_s, next(self._serial), what))

    def run(self, until: float) -> None:
        """Everything that is due up to `until`, in the order of time."""
        while True:
            at = self._coming[0][0] if self._coming else until
            turn: Process | None = None
            for process in self.processes:  # inlined: this loop is most of a simulation's own time
                if process.stopped:
                    continue
                if process._ready:
                    at, turn = self.now, process
                    break
                timers = process._scheduled
                if timers and timers[0]._when < at:
                    at, turn = timers[0]._when, process
            if at >= until:
                self.now = max(self.now, until)
                return
            self.now = max(self.now, at)
            if turn is not None:
                turn.step()
            else:
                heapq.heappop(self._coming)[2]()


class _NoFiles:
    """Stands where a loop's selector does: there are no files to wait for."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class Process(asyncio.BaseEventLoop):
    """One process. Work given to threads runs at once or a little later; a coroutine function given to a thread
    becomes a task, so that stand-ins for blocking work can wait in virtual time."""

    def __init__(self, clock: Clock, rng: random.Random, name: str) -> None:
        super().__init__()
        self._selector = _NoFiles()
        self._clock, self._rng, self.name = clock, rng, name
        self.dead = self.stopped = False
        self.crash: BaseException | None = None
        self._held: list[Callable[[], None]] = []
        self.set_exception_handler(self._failed)
        clock.processes.append(self)

    def time(self) -> float:
        return self._clock.now

    def step(self) -> None:
        asyncio.events._set_running_loop(self)
        self._thread_id = threading.get_ident()
        try:
            self._run_once()
        finally:
            self._thread_id = None
            asyncio.events._set_running_loop(None)

    def threads(self, what: Callable[[], None]) -> None:
        """What the threads of this process do: later when it is stopped, never when it is dead."""
        if self.stopped:
            self._held.append(what)
        elif not self.dead:
            what()

    def stop_running(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        held, self._held = self._held, []
        for what in held:
            self._clock.after(0.0, functools.partial(self.threads, what))

    def kill(self) -> None:
        """As by SIGKILL: what its tasks still do while they unwind, nobody hears of."""
        self.dead, self.stopped = True, False
        self._clock.processes.remove(self)
        for _ in range(100):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            while self._ready:
                self.step()
        self._scheduled.clear()
        self.close()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()
        inner = func.args[0] if isinstance(func, functools.partial) and func.args else func
        if inspect.iscoroutinefunction(inner):
            self._follow(self.create_task(func(*args)), future)
        elif self._rng.random() < 0.5:
            self.call_soon(self._work, func, args, future)
        else:
            self.call_later(self._rng.expovariate(50), self._work, func, args, future)
        return future

    def _work(self, func: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - whatever a thread raises is its caller's
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def _follow(self, task: asyncio.Task[Any], future: asyncio.Future[Any]) -> None:
        def done(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                return
            error = task.exception()  # read even if nobody waits any more: then it is nobody's, as a thread's is
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        task.add_done_callback(done)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.dead:
            self.crash = context.get("exception") or RuntimeError(context["message"])

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Nobody sleeps here who would have to be woken."""
