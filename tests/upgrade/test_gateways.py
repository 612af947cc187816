"""A gateway among relays, engines, agents and trainers of the other release; and a gateway on the data of the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import until
from tests.support.processes import Daemon
from tests.support.relays import PATIENT, Relays
from tests.support.releases import Release
from tests.support.scripted_engine import ScriptedEngine, in_thread, scripted
from tests.support.tiny_model import tiny_model
from tests.support.words import tokenizer

pytestmark = [pytest.mark.upgrade, pytest.mark.slow]

MODEL = "policy"


@dataclass
class Processes:
    """Daemons of any release, all ended with the test."""

    directory: Path
    started: list[Daemon] = field(default_factory=list)

    def start(self, release: Release, name: str, *command: str) -> Daemon:
        daemon = release.start(f"{name}-{len(self.started)}", list(command), self.directory)
        self.started.append(daemon)
        return daemon

    def gateway(self, release: Release, *flags: str) -> Daemon:
        return self.start(
            release, "gateway", "gateway", "serve", f"--model={MODEL}", "--port=0", "--poll-interval-s=0.2", *flags
        )

    def close(self) -> None:
        left = [daemon for daemon in reversed(self.started) if daemon.process.poll() is None]
        ends = {daemon.name: daemon.stop() for daemon in left}
        assert set(ends.values()) <= {0}, ends


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.close()


def get(gateway: Daemon, path: str) -> Any:
    return httpx.get(f"{gateway.ready['url']}{path}", timeout=60.0).raise_for_status().json()


def post(gateway: Daemon, path: str, **body: Any) -> Any:
    return httpx.post(f"{gateway.ready['url']}{path}", json=body, timeout=180.0).raise_for_status().json()


def engines(gateway: Daemon) -> list[tuple[str, int]]:
    return [(engine["state"], engine["version"]) for engine in get(gateway, "/status")["engines"]]


def roll_out(release: Release, gateway: Daemon, name: str) -> None:
    """A group of two rollouts by that release's runner."""
    where = ("--gateway", gateway.ready["url"], "--run-id", name)
    done = release.run("agents_env", "run", "tool-chain", *where, "--groups", "1", "--group-size", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_gateway_works_with_all_of_the_other_release(
    processes: Processes, relays: Relays, order: tuple[Release, Release]
) -> None:
    one, others = order
    engine = processes.start(
        others, "engine", "gateway", "engine", f"--model={tiny_model()}", "--served-model-name=policy", "--port=0"
    )
    pool = (f"--pool-dir={relays.pools / 'relay'}", "--pool-bytes=64MiB", *PATIENT)
    beside = f"--engine=embedded={engine.ready['url']}"
    relay = processes.start(
        others, "relay", "paramserver", "serve", "--name=r", f"--etcd={relays.etcd}", "--port=0", beside, *pool
    )
    gateway = processes.gateway(one, f"--tokenizer={tiny_model()}", f"--etcd={relays.etcd}")
    until(lambda: [state for state, _ in engines(gateway)] == ["serving"], "the registered engine")
    weights = tiny_model(seed=1) / "model.safetensors"
    published = others.program("publish.py", relay.ready["grpc"], MODEL, 1, "--weights", str(weights))
    until(lambda: engines(gateway) == [("serving", published["version"])], "version 1 in the engine")
    print(f"{one} gateway took the {others} engine that a {others} relay registered, and loaded version 1 into it")

    for runner in (one, others):
        roll_out(runner, gateway, f"by-{runner}")
    sampled: dict[str, Any] = {}
    for reader in (one, others):
        back = reader.program("sample.py", gateway.ready["url"], 2, "give_back")
        found = reader.program("sample.py", gateway.ready["url"], 2, "ack")
        assert found["sessions"] == back["sessions"], "what was given back comes again, the same"
        sampled |= found["sessions"]
    assert len(sampled) == 4
    assert {sum(f"by-{runner}" in name for name in sampled) for runner in (one, others)} == {2}, sampled.keys()
    assert all(set(session["versions"]) <= {-1, 1} for session in sampled.values())
    print(f"{one} gateway: runners and readers of {one} and {others} rolled out, sampled, gave back and acknowledged")


PROMPT, BUDGET, HELD_AT = [5, 6, 7], 40, 20


def ask(gateway: Daemon, session: str, prompt: list[int]) -> list[int]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": BUDGET, "session_id": session, "return_token_ids": True}
    [choice] = post(gateway, "/v1/completions", **body)["choices"]
    return list(choice["token_ids"])


def serve(processes: Processes, release: Release, data: Path, engine: str) -> Daemon:
    words = tokenizer(processes.directory / "model")
    gateway = processes.gateway(
        release, f"--tokenizer={words}", f"--data={data}", f"--engine=e0=vllm={engine}", "--no-probe"
    )
    until(lambda: engines(gateway) == [("serving", 0)], "the engine")
    return gateway


def wait_for_journal(gateway: Daemon, num_tokens: int) -> None:
    def written() -> bool:
        pool = get(gateway, "/status")["partial_response_pool"]
        return bool(pool["appended_tokens"] == num_tokens and not pool["buffered_tokens"])

    until(written, f"{num_tokens} tokens on disk")


def test_a_new_gateway_goes_on_with_the_data_of_an_old_one(
    processes: Processes, old: Release, new: Release, tmp_path: Path
) -> None:
    engine = ScriptedEngine("e0", chunk=2)
    data, copy = tmp_path / "data", tmp_path / "copy"
    with in_thread(engine) as url, ExitStack() as stack:
        before = serve(processes, old, data, url)
        for name in ("leased", "waits"):
            ask(before, name, PROMPT)
            post(before, f"/sessions/{name}/finish", reward=1.0)
        leased = old.program("sample.py", before.ready["url"], 1, "keep")
        assert list(leased["sessions"]) == ["leased"]
        first = ask(before, "live", PROMPT)
        engine.hold_at = HELD_AT
        client = stack.enter_context(ThreadPoolExecutor(1))
        cut = client.submit(ask, before, "cut", [9, 8])
        wait_for_journal(before, 3 * BUDGET + HELD_AT)
        before.kill()
        assert cut.exception(60.0) is not None
        shutil.copytree(data, copy)
        engine.hold_at = None

        after = serve(processes, new, data, url)
        assert ask(after, "cut", [9, 8]) == scripted([9, 8], BUDGET)[0]
        resumed = [request.prompt for request in engine.requests[4:]]
        assert [len(prompt) for prompt in resumed] == [2 + HELD_AT], "it went on from the tokens that old had written"
        print("new gateway on old --data: an unfinished turn went on where old had left it, and is whole")

        second = ask(after, "live", [*PROMPT, *first, 4])
        assert second == scripted([*PROMPT, *first, 4], BUDGET)[0]
        for name in ("live", "cut"):
            post(after, f"/sessions/{name}/finish", reward=0.5)
        assert get(after, "/sessions/waits")["state"] == "finished"
        found = new.program("sample.py", after.ready["url"], 3, "ack")["sessions"]
        assert set(found) == {"waits", "live", "cut"}, "what old's reader has under a lease stays there"
        assert found["live"]["token_ids"] == [*PROMPT, *first, 4, *second]
        assert found["waits"]["token_ids"] == [*PROMPT, *scripted(PROMPT, BUDGET)[0]]
        assert found["waits"]["logprobs"][len(PROMPT) :] == scripted(PROMPT, BUDGET)[1]
        assert post(after, "/experience/ack", lease_id=leased["lease"]) == {"acknowledged": 1}
        print("new gateway on old --data: a live session went on; a finished one was sampled; old's lease was ended")
        assert after.stop() == 0

        refused = old.run("gateway", *command_line(processes, data, url))
        assert refused.returncode == 1
        assert "newer gateway" in refused.stderr
        print(f"old gateway on new --data is refused: {refused.stderr.strip().splitlines()[-1]}")
        back = serve(processes, old, copy, url)
        assert ask(back, "live", [*PROMPT, *first, 4]) == second
        print("old gateway on the copy made before the upgrade: it serves, as of then")


def command_line(processes: Processes, data: Path, engine: str) -> list[str]:
    words = f"--tokenizer={processes.directory / 'model'}"
    return ["serve", f"--model={MODEL}", "--port=0", words, f"--data={data}", f"--engine=e0=vllm={engine}"]


def test_new_calls_are_refused_by_name_at_an_old_gateway(
    processes: Processes, old: Release, new: Release, tmp_path: Path
) -> None:
    with in_thread(ScriptedEngine("e0")) as url:
        gateway = serve(processes, old, tmp_path / "data", url)
        told = new.program("newer.py", gateway.ready["url"])
        assert told == {name: told[name] for name in ("add", "rows", "strategy", "statistics")}
        assert "strategy" in told["strategy"]
        for name in ("add", "rows", "statistics"):
            assert "no route" in told[name], told[name]
        print(f"new SDK on old gateway: {json.dumps(told, indent=1)}")
