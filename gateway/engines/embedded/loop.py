"""The thread that owns the model. All other threads send it commands through one bounded queue.

Invariants:
- the engine, its control state and its weights are touched by this thread alone;
- commands run between steps, in order; while there is nothing to compute the thread waits for the next one;
- the deltas of a step go to `deliver`, called on this thread in order;
- an error inside a step is fatal: `failed` is set, every waiting command fails, and nothing is computed any more.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from gateway.engines.embedded.batching.sequence import Delta, GenerationRequest
from gateway.engines.embedded.control import Control, PauseMode
from gateway.engines.embedded.engine import Engine, EngineStatistics
from protos.errors import LaminarError, OutOfCapacity, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
STOP_TIMEOUT_S = 30.0


class ModelLoop:
    """Runs an Engine. Methods may be called from any thread; each returns a future, done between steps."""

    def __init__(
        self, engine: Engine, deliver: Callable[[list[Delta]], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._engine = engine
        self._control = Control()
        self._deliver = deliver
        self._on_failure = on_failure
        # Submits of every request that may be open, and some control calls. An abort only follows a submit that was
        # accepted, so aborts are never refused, and there are at most as many.
        self._inbox_max = engine.config.max_waiting + engine.config.max_num_seqs + 64
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue(3 * self._inbox_max)
        self._thread = threading.Thread(target=self._main, name="model-loop", daemon=True)
        self._stopping = False
        self._drained: list[Future[None]] = []
        self.failed: BaseException | None = None
        self.statistics: EngineStatistics = engine.statistics()
        """As of the last step; replaced whole, so any thread may read it."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step in progress; running requests are dropped."""
        if self._thread.is_alive():
            self._inbox.put(self._set_stopping, timeout=STOP_TIMEOUT_S)
            self._thread.join(STOP_TIMEOUT_S)

    # -- commands --

    def submit(self, request: GenerationRequest) -> Future[None]:
        return self._call(lambda: self._submit(request))

    def abort(self, request_ids: list[str] | None) -> Future[int]:
        """Ends requests (None: all) with finish reason `abort`; returns how many there were."""
        return self._call(lambda: self._abort(request_ids), always=True)

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """Done once nothing is computed: at once, or in `wait` when the last running request has ended."""
        done: Future[None] = _future()
        started = self._call(lambda: self._pause(mode, clear_cache, done))
        started.add_done_callback(lambda f: done.set_exception(e) if (e := f.exception()) is not None else None)
        return done

    def resume(self) -> Future[None]:
        return self._call(self._resume)

    def is_paused(self) -> Future[bool]:
        return self._call(lambda: self._control.state != "serving")

    def init_transfer(self) -> Future[None]:
        return self._call(self._control.init_transfer)

    def start_update(self) -> Future[None]:
        return self._call(self._control.start_update)

    def update_weights(self, directory: Path) -> Future[None]:
        return self._call(lambda: self._update(directory))

    def finish_update(self, label: str | None) -> Future[None]:
        return self._call(lambda: self._finish(label))

    def reload_weights(self, directory: Path) -> Future[None]:
        """Loads outside a session, without a label; a failure halfway fences the engine like one in a session."""
        return self._call(lambda: self._load(directory))

    def set_label(self, label: str) -> Future[None]:
        return self._call(lambda: self._label(label))

    def weight_version(self) -> Future[str]:
        return self._call(lambda: self._engine.weight_version)

    def reset_prefix_cache(self) -> Future[None]:
        return self._call(self._engine.scheduler.new_epoch)

    # -- on the model thread --

    def _submit(self, request: GenerationRequest) -> None:
        self._control.check_admission()
        self._engine.add(request)

    def _abort(self, request_ids: list[str] | None) -> int:
        deltas = self._engine.abort(request_ids)
        if deltas:
            self._deliver(deltas)
        return len(deltas)

    def _pause(self, mode: PauseMode, clear_cache: bool, done: Future[None]) -> None:
        if mode == "abort":
            self._abort(None)
        self._control.pause(mode, idle=self._engine.idle)
        if clear_cache:
            if mode == "keep":
                self._engine.scheduler.preempt_all()
            self._engine.scheduler.new_epoch()
        self._drained.append(done)

    def _resume(self) -> None:
        self._control.resume()
        self._settle_drained()

    def _update(self, directory: Path) -> None:
        self._control.check_session()
        self._load(directory)

    def _load(self, directory: Path) -> None:
        self._engine.check_weights(directory)
        self._control.touch()
        try:
            self._engine.load_weights(directory)
        except (LaminarError, OSError, RuntimeError) as e:
            raise LaminarError(
                f"loading {directory} failed halfway: {e}", hint="the engine stays fenced; load a good snapshot"
            ) from e
        self._control.loaded()

    def _finish(self, label: str | None) -> None:
        self._control.finish_update(label, self._engine.weight_version)
        if label is not None:
            self._engine.weight_version = label

    def _label(self, label: str) -> None:
        self._engine.weight_version = label

    def _set_stopping(self) -> None:
        self._stopping = True

    def _settle_drained(self) -> None:
        if self._control.draining and self._engine.idle:
            self._control.draining = False
        if self._control.draining and self._control.pause_mode is not None:
            return
        for future in self._drained:
            future.set_result(None)
        self._drained.clear()

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                if self._control.computes and not self._engine.idle:
                    deltas = self._engine.step()
                    self.statistics = self._engine.statistics()  # first: counts every token that a client has
                    self._deliver(deltas)
                else:
                    self.statistics = self._engine.statistics()
                self._settle_drained()
        except BaseException as e:
            self.failed = e
            log.exception("the model loop ended by an error; the engine is dead")
            self._on_failure(e)
            raise
        finally:
            self._refuse_rest()

    def _run_commands(self) -> None:
        """Runs what is queued; waits for a command when there is nothing to compute."""
        waits = self._engine.idle or not self._control.computes
        while True:
            try:
                command = self._inbox.get(block=waits)
            except queue.Empty:
                return
            waits = False
            command()

    def _refuse_rest(self) -> None:
        """After the end: commands still queued find their futures cancelled."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _call(self, function: Callable[[], T], *, always: bool = False) -> Future[T]:
        future: Future[T] = _future()

        def run() -> None:
            if self.failed is not None or self._stopping:
                future.set_exception(Unavailable("the engine has ended", hint="start it again"))
                return
            try:
                result = function()
            except LaminarError as e:
                future.set_exception(e)  # an error of the caller or of its files: the engine continues
            except BaseException as e:
                future.set_exception(e)
                raise
            else:
                future.set_result(result)

        if self.failed is not None or not self._thread.is_alive():
            future.set_exception(Unavailable("the engine is not running", hint="start it again"))
            return future
        if self._inbox.qsize() >= self._inbox_max and not always:
            future.set_exception(OutOfCapacity(f"{self._inbox_max} commands wait for the model loop"))
        else:
            self._inbox.put_nowait(run)
        return future


def _future() -> Future[Any]:
    """A future that its waiter cannot cancel: the command runs all the same."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
