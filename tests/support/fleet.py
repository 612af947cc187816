"""A small fleet of real processes for tests: embedded engines on the tiny model, a gateway, and a relay when asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.support import processes
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.tiny_model import Dtype, tiny_model

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout_s: float = 180.0) -> T:
    """Polls until the condition holds; fails naming what never came."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        time.sleep(0.02)
    return value


@dataclass
class Fleet:
    """`with Fleet(...) as fleet`: every process ends cleanly at the end, but those that a test killed.

    A start that fails leaves no process behind.
    """

    directory: Path
    num_engines: int = 2
    dtype: Dtype = "float32"
    engine_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()
    relay: str | None = None
    engines: dict[str, Daemon] = field(default_factory=dict)
    gateway: Daemon = field(init=False)
    _ports: KeptPorts = field(default_factory=KeptPorts)

    def __enter__(self) -> Fleet:
        try:
            self._start()
        except BaseException:
            for daemon in self._alive():
                daemon.kill()
            self._ports.close()
            raise
        return self

    def _start(self) -> None:
        for number in range(self.num_engines):
            self.start_engine(f"e{number}")
        flags = [f"--engine={name}=vllm={engine.ready['url']}" for name, engine in self.engines.items()]
        flags += [f"--relay={self.relay}"] if self.relay else []
        command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={tiny_model(dtype=self.dtype)}"]
        self.gateway = processes.start(
            "gateway", [*command, "--poll-interval-s=0.2", *flags, *self.gateway_flags], self.directory
        )
        until(lambda: all(e["state"] == "serving" for e in self.status()["engines"]), "serving engines")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ends = {daemon.name: daemon.stop() for daemon in (self.gateway, *self._alive())}
        self._ports.close()
        if kind is None:
            assert set(ends.values()) == {0}, (ends, self.gateway.log()[-4000:])

    def _alive(self) -> list[Daemon]:
        found = [daemon for daemon in (getattr(self, "gateway", None), *self.engines.values()) if daemon is not None]
        return [daemon for daemon in found if daemon.process.poll() is None]

    def start_engine(self, name: str) -> Daemon:
        """An engine of that name; one that a test killed comes back under its address."""
        command = [
            "tests.support.held_engine",
            str(self._hold),
            f"--port={self._ports.of(name)}",
            f"--model={tiny_model(dtype=self.dtype)}",
        ]
        flags = (f"--dtype={self.dtype}", "--served-model-name=policy", "--weight-version=0", *self.engine_flags)
        self.engines[name] = processes.start(name, [*command, *flags], self.directory)
        return self.engines[name]

    def hold(self) -> None:
        """From now on turns stop in their middle (see `held_engine`), until `go_on`."""
        self._hold.touch()

    def go_on(self) -> None:
        self._hold.unlink()

    @property
    def _hold(self) -> Path:
        return self.directory / "hold"

    @property
    def url(self) -> str:
        return str(self.gateway.ready["url"])

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.url}/status").raise_for_status().json()
        return status

    def engine_states(self) -> dict[str, tuple[str, int]]:
        """Engine to its state and version."""
        return {e["name"]: (e["state"], e["version"]) for e in self.status()["engines"]}

    def running_engine(self) -> str:
        """The engine that runs turns now; the test made sure that it is one."""
        running = until(lambda: [e["name"] for e in self.status()["engines"] if e["running"]], "a running turn")
        assert len(running) == 1, running
        return str(running[0])
