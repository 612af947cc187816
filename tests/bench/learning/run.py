"""One run: its processes (`scene`), and the agents and the watch, which are in this one.

The clock begins when every engine serves the first version, and ends with the trainer's last publish. Rewards of
versions are computed afterwards, so that they cost no mode anything.

Invariants:
- a process that fails, or a run in which no step is done for `STALL_S`, fails the run: no result is half a run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file

from tests.bench.learning import task
from tests.bench.learning.model import expected_reward
from tests.bench.learning.rollouts import Answer, Rollouts
from tests.bench.learning.scene import Scene
from tests.bench.learning.settings import Settings

EVALUATED = 64
"""Numbers, spread as the prompts' are, over which a version's expected reward is the mean."""
LOOK_S = 0.5
LOADED_POLL_S = 0.02
STALL_S = 120.0
Progress = Callable[[str], None]


@dataclass
class Watch:
    """What is seen of a run from outside, by the gateway's status."""

    scene: Scene
    http: aiohttp.ClientSession
    looks: list[dict[str, float]] = field(default_factory=list)
    loaded_unix_s: dict[int, float] = field(default_factory=dict)  # by version: when a barrier's next batch began

    async def status(self) -> dict[str, Any]:
        async with self.http.get(f"{self.scene.gateway}/status") as response:
            found: dict[str, Any] = await response.json()
        return found

    async def look(self) -> dict[str, float]:
        status = await self.status()
        counters = ("tokens_generated", "refreshes", "moves", "turns_mixed_version", "turns_cut")
        found = {name: status["counters"][name] for name in counters}
        running = sum(engine["running"] for engine in status["engines"])
        found |= {"t": time.time(), "running": running}
        self.looks.append(found)
        return found

    async def loaded(self, version: int) -> None:
        """Returns once every engine serves `version` or a newer one."""
        while True:
            engines = (await self.status())["engines"]
            if all(engine["state"] == "serving" and engine["version"] >= version for engine in engines):
                self.loaded_unix_s[version] = time.time()
                return
            await asyncio.sleep(LOADED_POLL_S)


async def run(settings: Settings, model: Path, progress: Progress) -> dict[str, Any]:
    """The result of one run, as it is kept. Raises RuntimeError, with the end of a log, when it fails."""
    with tempfile.TemporaryDirectory(prefix="laminar-learning-") as scratch:
        directory = Path(scratch)
        with ExitStack() as stack:
            scene = Scene.start(settings, model, directory, stack)  # in this thread: its end is theirs
            trained = await _train(scene, settings, progress)
        progress("trained; its versions are evaluated")
        rewards = _evaluate(model, directory / "versions")
    return _result(settings, trained, rewards)


@dataclass(frozen=True)
class Trained:
    """What was seen of a run. `cpu_s`: by kind of process, since `began` (unix)."""

    began: float
    steps: Sequence[Mapping[str, Any]]
    answers: Sequence[Answer]
    watch: Watch
    cpu_s: Mapping[str, float]


async def _train(scene: Scene, settings: Settings, progress: Progress) -> Trained:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        watch = Watch(scene, http)
        rollouts = Rollouts(settings, scene.gateway, http)
        await asyncio.wait_for(watch.loaded(1), STALL_S)
        before, own, began = scene.cpu_s(), time.process_time(), time.time()
        await watch.look()
        playing = rollouts.synchronous(watch.loaded) if settings.mode == "barrier" else rollouts.asynchronous()
        players = asyncio.create_task(playing)
        try:
            await _until_trained(watch, players, settings, progress)
            await watch.look()
            cpu_s = {name: used - before[name] for name, used in scene.cpu_s().items()}
        finally:
            players.cancel()
            await asyncio.gather(players, return_exceptions=True)
    steps = _steps(scene.directory)
    cpu_s |= {"trainer": steps[-1]["cpu_s"], "agents": time.process_time() - own}
    return Trained(began, steps, rollouts.answers, watch, cpu_s)


async def _until_trained(watch: Watch, players: asyncio.Task[None], settings: Settings, progress: Progress) -> None:
    """Looks until the trainer has done its steps."""
    done, since, shown = 0, time.monotonic(), time.monotonic()
    while watch.scene.trainer.process.poll() is None:
        if failed := watch.scene.failed():
            raise RuntimeError(f"{failed.name} ended with {failed.process.poll()}:\n{failed.log()[-3000:]}")
        if players.done():
            players.result()
        await asyncio.sleep(LOOK_S)
        await watch.look()
        steps = _steps(watch.scene.directory)
        if len(steps) > done:
            done, since = len(steps), time.monotonic()
        if time.monotonic() - since > STALL_S:
            log = watch.scene.trainer.log()[-1500:]
            raise RuntimeError(f"no step for {STALL_S:.0f} s after {done}: {await watch.status()}\n{log}")
        if steps and time.monotonic() - shown > 10:
            shown = time.monotonic()
            reward = statistics.fmean(step["reward"] for step in steps[-5:])
            progress(f"step {done} of {settings.steps}, reward {reward:.2f}")
    if watch.scene.trainer.process.poll():
        raise RuntimeError(f"the trainer failed:\n{watch.scene.trainer.log()[-3000:]}")


def _steps(directory: Path) -> list[dict[str, Any]]:
    """Those that are written whole."""
    text = (directory / "steps.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _evaluate(model_dir: Path, versions: Path) -> list[tuple[int, float]]:
    """(step, expected reward) of each version that was written."""
    from transformers import AutoModelForCausalLM  # here: it takes seconds, and most that import this file use no model
    from transformers.utils import logging

    torch.set_num_threads(1)  # two of them wait for each other where the machine is busy
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    numbers = task.even_numbers(EVALUATED)
    found = []
    for step in sorted(int(path.stem) for path in versions.iterdir()):
        model.load_state_dict(load_file(versions / f"{step}.safetensors"))
        found.append((step, round(expected_reward(model, numbers), 5)))
    return found


def _result(settings: Settings, trained: Trained, rewards: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Columns by step; times in seconds since the run's beginning."""
    steps, watch, began = trained.steps, trained.watch, trained.began
    first, last, end = watch.looks[0], watch.looks[-1], steps[-1]["t"]
    columns = {name: [step[name] for step in steps] for name in steps[0] if name not in ("t", "cpu_s")}
    within = [look for look in watch.looks if look["t"] <= end]
    answers = [answer for answer in trained.answers if answer[0] <= end]
    published = {step["version"]: step["t"] for step in steps}
    loading = [at - published[version] for version, at in watch.loaded_unix_s.items() if version in published]
    lengths = sorted(tokens for _, tokens, _, _ in answers)
    return {
        "mode": settings.mode,
        "seed": settings.seed,
        "settings": asdict(settings),
        "wall_s": round(end - began, 2),
        "t": [round(step["t"] - began, 3) for step in steps],
        **columns,
        "evaluated": rewards,
        "generated_tokens": last["tokens_generated"] - first["tokens_generated"],
        "counters": {name: last[name] for name in ("refreshes", "moves", "turns_mixed_version", "turns_cut")},
        "slots_used": round(
            statistics.fmean(look["running"] for look in within) / (settings.engines * settings.slots), 4
        ),
        "loading_s": round(sum(loading), 3),
        "sessions": len(answers),
        "lengths": {f"p{q}": lengths[min(len(lengths) - 1, len(lengths) * q // 100)] for q in (50, 90, 99)},
        "token_ms": round(1000 * statistics.median(seconds / tokens for _, tokens, _, seconds in answers), 2),
        "cpu_s": {name: round(seconds, 2) for name, seconds in trained.cpu_s.items()},
    }
