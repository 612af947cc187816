"""prime-rl's filesystem mode: directories as its trainer leaves them, and the calls that its orchestrator makes.

prime-rl itself is not here. `save` and `update_weights` do what its source does (559b4477: `save_state_dict_parallel`,
`FileSystemWeightBroadcast`, `utils/client.py`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from paramserver.client import RelayClient, SealedVersion
from tests.support import processes
from tests.support.training.scene import TrainingScene

pytestmark = pytest.mark.slow

RANKS = 2
CALL_TIMEOUT_S = 120.0


def save(broadcasts: Path, step: int, tensors: dict[str, torch.Tensor]) -> Path:
    """As prime-rl's ranks save together: a shard each, under another name at first; the index, then the marker."""
    directory = broadcasts / f"step_{step}"
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for rank in range(RANKS):
        shard = {name: tensors[name].contiguous() for name in sorted(tensors)[rank::RANKS]}
        kept = directory / f"tmp-rank{rank}.safetensors"
        save_file(shard, kept, metadata={"format": "pt"})
        kept.rename(directory / f"model-{rank + 1:05d}-of-{RANKS:05d}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{rank + 1:05d}-of-{RANKS:05d}.safetensors")
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (directory / "STABLE").touch()
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Copies of a directory's tensors."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor.clone() for path in files for name, tensor in load_file(path).items()}


class Orchestrator:
    """The admin calls of prime-rl's orchestrator, once each: it repeats those that fail with 500 or more."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=CALL_TIMEOUT_S)

    def update_weights(self, directory: Path | None) -> httpx.Response:
        paused = self.http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert paused.status_code == 200
        if directory is not None:
            (directory / "NCCL_READY").touch()
        name = None if directory is None else directory.as_posix()
        answer = self.http.post("/update_weights", json={"weight_dir": name})
        assert self.http.post("/resume").status_code == 200
        return answer


class Run:
    """A fleet, the server in front of it, and the folder that prime-rl's trainer writes to."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.scene = TrainingScene(Path(sys.executable), directory, stack)
        command = ["trainer_client.integrations.prime_rl", f"--relay={self.scene.relay}", "--port=0"]
        server = processes.start("prime-rl", [*command, f"--gateway={self.scene.gateway}"], directory)
        stack.callback(server.stop)
        self.orchestrator = Orchestrator(server.ready["url"])
        stack.callback(self.orchestrator.http.close)
        self.broadcasts = directory / "out" / "broadcasts"
        self._weights = load_file(self.scene.model / "model.safetensors")

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Other ones in each step; prime-rl saves bfloat16."""
        return {name: (tensor * (1 + step / 64)).to(torch.bfloat16) for name, tensor in self._weights.items()}

    def versions(self) -> list[SealedVersion]:
        async def look() -> list[SealedVersion]:
            async with RelayClient(self.scene.relay) as relay:
                return list(await relay.versions("policy"))

        return asyncio.run(look())

    def held(self, version: int) -> dict[str, torch.Tensor]:
        """What an engine that acquires `version` maps."""

        async def copied() -> dict[str, torch.Tensor]:
            async with RelayClient(self.scene.relay) as relay:
                lease = await relay.acquire("policy", version, holder="test")
                found = read(Path(lease.path))
                await relay.release(lease)
                return found

        return asyncio.run(copied())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(tmp_path_factory.mktemp("prime-rl"), stack)


def test_it_is_ready_as_prime_rl_checks_it(run: Run) -> None:
    assert run.orchestrator.http.get("/health").status_code == 200
    models = run.orchestrator.http.get("/v1/models").json()["data"]
    assert "policy" in [model["id"] for model in models]


def test_an_update_of_weights_is_a_version_that_engines_serve(run: Run) -> None:
    for step in (10, 11):
        tensors = run.tensors(step)
        answer = run.orchestrator.update_weights(save(run.broadcasts, step, tensors))
        assert answer.status_code == 200, answer.text
        version = answer.json()["version"]
        engines = httpx.get(f"{run.scene.gateway}/status").raise_for_status().json()["engines"]
        assert max(engine["version"] for engine in engines if engine["state"] == "serving") == version
        assert run.versions()[-1].step == step
        held = run.held(version)
        assert held.keys() == tensors.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


def test_a_request_sent_again_publishes_once_and_a_directory_saved_again_anew(run: Run) -> None:
    directory = save(run.broadcasts, 20, run.tensors(20))
    with pytest.raises(httpx.TimeoutException):
        run.orchestrator.http.post("/update_weights", json={"weight_dir": directory.as_posix()}, timeout=0.001)
    first, second = (run.orchestrator.update_weights(directory).json()["version"] for _ in range(2))
    assert first == second
    assert [version.step for version in run.versions()].count(20) == 1
    (directory / "STABLE").unlink()
    save(run.broadcasts, 20, run.tensors(21))
    assert run.orchestrator.update_weights(directory).json()["version"] == first + 1


def test_what_is_not_complete_yet_may_be_sent_again(run: Run) -> None:
    directory = save(run.broadcasts, 30, run.tensors(30))
    (directory / "STABLE").unlink()
    answer = run.orchestrator.update_weights(directory)
    assert answer.status_code == 503
    assert "STABLE" in answer.json()["error"]["message"]
    (directory / "STABLE").touch()
    assert run.orchestrator.update_weights(directory).status_code == 200


def test_weights_of_a_checkpoint_are_marked_beside_them(run: Run) -> None:
    """Where prime-rl resumes: `checkpoints/step_N/weight`, and the marker in `step_N`."""
    saved = save(run.broadcasts, 40, run.tensors(40))
    step = run.broadcasts.parent / "checkpoints" / "step_40"
    step.mkdir(parents=True)
    saved.rename(step / "weight")
    (step / "weight" / "STABLE").rename(step / "STABLE")
    assert run.orchestrator.update_weights(step / "weight").status_code == 200
    assert run.versions()[-1].step == 40


def test_other_modes_are_refused_with_what_would_be_right(run: Run) -> None:
    adapter = save(run.broadcasts, 50, run.tensors(50))
    (adapter / "adapter_model.safetensors").touch()
    calls = [
        run.orchestrator.update_weights(None),
        run.orchestrator.update_weights(adapter),
        run.orchestrator.http.post("/load_lora_adapter", json={}),
        run.orchestrator.http.post("/init_broadcaster", json={}),
    ]
    for answer in calls:
        assert answer.status_code == 400, "prime-rl does not send it again"
        assert "filesystem" in answer.json()["error"]["message"]
