"""What the gateway promises, with real vLLM behind it: versions, loads that fail half-way, deaths and moves.

Every assertion on tokens is against `transformers` with the weights of the version that the answer names.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from gateway.engines.base import EngineFailed, StreamCut
from gateway.engines.vllm import VllmEngine
from tests.support.adapters import lent
from tests.support.fleet import until
from tests.support.greedy import check_greedy
from tests.support.snapshots import seal
from tests.support.tiny_model import VLLM_HEAD_DIM, tiny_model
from tests.vllm.scene import PATIENCE_S, RANKS, Scene

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LAST_LAYER = "model.layers.3.mlp.down_proj.weight"
PROMPTS = [tuple(range(40, 60)), tuple(range(100, 400)), (5, 6, 7)]
TOKENS = 48
LONG = 1500
"""Tokens of a turn that is still running whenever a test looks; two ranks on busy cores make some ten a second."""

ROUNDS_MAX = 20
"""Until both directions were seen: the planner empties the server with fewer tokens, if it pays."""


@pytest.fixture(scope="module")
def scene(shared_etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(shared_etcd, tmp_path_factory.mktemp("scene"), stack)


def test_every_rank_speaks_each_version_and_keeps_no_hold_on_its_memory(scene: Scene) -> None:
    for _ in range(3):
        version = scene.publish()
        scene.until_served(version)
        for name in RANKS:
            for prompt in PROMPTS:
                check_greedy(scene.ask_directly(name, prompt, TOKENS), version, prompt, TOKENS, VLLM_HEAD_DIM)
        scene.ask(TOKENS).check(version)
    workers = {name: server.workers() for name, server in scene.servers.items()}
    assert {name: len(found) for name, found in workers.items()} == RANKS
    maps = [Path(f"/proc/{worker.pid}/maps").read_text() for found in workers.values() for worker in found]
    assert not [text for text in maps if str(scene.pools) in text]


@pytest.mark.parametrize(
    "damage", [{LAST_LAYER: None}, {LAST_LAYER: torch.zeros(3, 5)}], ids=["a tensor missing", "a tensor too small"]
)
def test_a_load_that_fails_half_way_is_mended_by_the_version_before(
    scene: Scene, damage: dict[str, torch.Tensor | None]
) -> None:
    good = scene.publish()
    scene.until_served(good)
    bad = scene.publish(**damage)
    until(lambda: {e["engine"] for e in scene.fenced_at(bad)} == set(RANKS), "a failure of each", PATIENCE_S)
    for _ in range(3):
        scene.ask(TOKENS).check(good)
    scene.until_served(good)
    for name in RANKS:
        check_greedy(scene.ask_directly(name, PROMPTS[0], TOKENS), good, PROMPTS[0], TOKENS, VLLM_HEAD_DIM)
    newest = scene.publish()
    scene.until_served(newest)
    scene.ask(TOKENS).check(newest)


@pytest.mark.parametrize("name", RANKS)
async def test_files_that_vanish_after_the_proof_leave_the_server_fenced(
    scene: Scene, name: str, tmp_path: Path
) -> None:
    class Sabotaged(VllmEngine):
        async def _update_is_open(self) -> bool:
            """The last thing before the update."""
            for file in bad.path.glob("*.safetensors"):
                file.unlink()
            return await super()._update_is_open()

    held = scene.version
    bad, good = (seal(tmp_path, v, tiny_model(seed=v, head_dim=VLLM_HEAD_DIM)) for v in (901, held))
    url = scene.servers[name].ready["url"]
    sabotaged, engine, brief = (
        kind(url, lent(stall_timeout_s=s)) for kind, s in ((Sabotaged, 9.0), (VllmEngine, 60.0), (VllmEngine, 1.0))
    )
    try:
        with pytest.raises(EngineFailed, match="is not loaded: rank 0"):
            await sabotaged.load(bad.path, bad.version, bad.digest)
        assert (await engine.limits()).fenced
        with pytest.raises(StreamCut):
            await scene.say(brief, PROMPTS[0], 4)
        assert await engine.load(good.path, held, good.digest) > 0
        said = await scene.say(engine, PROMPTS[0], TOKENS)
        check_greedy(said, held, PROMPTS[0], TOKENS, VLLM_HEAD_DIM)
    finally:
        for adapter in (sabotaged, engine, brief):
            await adapter.close()


def test_a_load_whose_relay_dies_does_not_count(scene: Scene) -> None:
    before = scene.version
    held = {name: server.workers() for name, server in scene.servers.items()}
    for worker in (worker for workers in held.values() for worker in workers):
        worker.send_signal(signal.SIGSTOP)  # the load stands still in the middle
    try:
        version = scene.publish()
        until(lambda: {s for s, _ in scene.states().values()} == {"refreshing"}, "loads that began", PATIENCE_S)
        scene.relay.kill()
    finally:
        for worker in (worker for workers in held.values() for worker in workers):
            worker.send_signal(signal.SIGCONT)
    until(lambda: {s for s, _ in scene.states().values()} <= {"fenced", "refreshing"}, "a fence", PATIENCE_S)
    asking = scene.ask_meanwhile(TOKENS)
    assert {v for _, v in scene.states().values()} == {before}
    scene.restart_relay()
    scene.until_served(version)
    for answer in asking.answers():
        answer.check(version)


def test_kill_9_in_mid_stream_loses_no_token(scene: Scene) -> None:
    version = scene.publish()
    scene.until_served(version)
    asking, victim = scene.catch(scene.stopped_in_mid_stream, LONG)
    scene.servers[victim].kill()
    [answer] = asking.answers()
    answer.check(version)
    counters = scene.status()["counters"]
    assert (counters["turns_resumed"] >= 1, counters["turns_lost"]) == (True, 0)
    until(lambda: scene.states()[victim][0] == "dead", "notice of the death", PATIENCE_S)
    scene.start_again(victim)
    scene.until_served(version)
    check_greedy(scene.ask_directly(victim, PROMPTS[1], TOKENS), version, PROMPTS[1], TOKENS, VLLM_HEAD_DIM)


def test_turns_move_between_one_rank_and_two_and_no_token_differs(scene: Scene) -> None:
    seen: set[tuple[str, str]] = set()
    for number in range(ROUNDS_MAX):
        version = scene.version
        turns = 2 + number % 2  # with a third turn the other server is the fuller
        asking, _ = scene.catch(lambda turns=turns: sorted(scene.running()) == [1, turns - 1], LONG, count=turns)
        scene.publish()
        for answer in asking.answers():
            answer.check(version)
        scene.until_served(scene.version)
        seen |= scene.moves()
        if len(seen) == 2:
            break
    assert seen == {("one", "two"), ("two", "one")}, "moves both ways"
