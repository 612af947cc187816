"""Gateways, as real processes, for tests of what official clients see: before the embedded engine or a scripted one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from gateway.tokens import Codec
from tests.support import processes
from tests.support.fleet import until
from tests.support.processes import Daemon
from tests.support.scripted_engine import ScriptedEngine, in_thread
from tests.support.tiny_model import tiny_model

EOS = 2


@dataclass
class ServedGateway:
    """A running gateway and what is needed to check it."""

    url: str
    daemon: Daemon
    codec: Codec

    @property
    def hold(self) -> Path:
        """While it exists, the embedded engine's turns stop in their middle."""
        return self.daemon.log_path.with_name("hold")

    def counter(self, name: str) -> int:
        return int(httpx.get(f"{self.url}/status").raise_for_status().json()["counters"][name])


@contextlib.contextmanager
def served(directory: Path, engine_url: str, *flags: str) -> Iterator[ServedGateway]:
    """A gateway before one engine; it has to end cleanly."""
    model = str(tiny_model())
    command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={model}", *flags]
    daemon = processes.start(
        "gateway", [*command, f"--data={directory / 'data'}", f"--engine=e0=vllm={engine_url}"], directory
    )
    gateway = ServedGateway(daemon.ready["url"], daemon, Codec.load(model))
    until(lambda: _states(gateway.url) == ["serving"], "a serving engine")
    yield gateway
    assert daemon.stop() == 0, daemon.log()


@contextlib.contextmanager
def over_embedded(directory: Path, *flags: str) -> Iterator[ServedGateway]:
    """Answers what the tiny model says."""
    command = ["tests.support.held_engine", str(directory / "hold"), "--port=0", f"--model={tiny_model()}"]
    engine = processes.start("engine", [*command, "--served-model-name=policy", "--dtype=float32"], directory)
    with served(directory, engine.ready["url"], *flags) as gateway:
        yield gateway
    assert engine.stop() == 0, engine.log()


@contextlib.contextmanager
def over_script(directory: Path, says: Callable[[str], str], *flags: str) -> Iterator[ServedGateway]:
    """Answers what `says` makes of the prompt's text, and the end of sequence."""
    codec = Codec.load(tiny_model())

    def generate(prompt: Sequence[int]) -> list[int]:
        return [*codec.encode(says(codec.decode(prompt))), EOS]

    engine = ScriptedEngine(generate=generate, chunk=3, burst=True)
    with in_thread(engine) as url, served(directory, url, *flags) as gateway:
        yield gateway


def _states(url: str) -> list[str]:
    return [engine["state"] for engine in httpx.get(f"{url}/status", timeout=60).json()["engines"]]
