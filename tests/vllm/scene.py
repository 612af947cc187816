"""The whole with real vLLM: etcd, a relay, two servers (one of them with two ranks), and the gateway before them."""

from __future__ import annotations

import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gateway.core.types import SamplingParams
from gateway.engines.vllm import VllmEngine
from tests.support import processes, vllm
from tests.support.fleet import until
from tests.support.greedy import check_greedy
from tests.support.processes import Daemon
from tests.support.relays import Relays
from tests.support.tiny_model import VLLM_HEAD_DIM, tiny_model
from trainer_client import Publisher

T = TypeVar("T")

RANKS = {"one": 1, "two": 2}
"""The servers' names, and how many ranks each has."""
WANTED: dict[str, Any] = {"return_token_ids": True, "return_weight_versions": True, "ignore_eos": True}
RUNNING_TOKENS = 60
"""Prompt and some: a turn with so many is in mid-stream."""
SETTLE_S = 0.5
LOOK_S = 0.02
PATIENCE_S = 180.0
"""For what needs a server's start, or a few tries of a load."""


class Scene:
    """Versions are published in order; version `n`'s weights are those of seed `n`, unless a test damages them."""

    def __init__(self, etcd: str, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._relays = Relays(etcd, directory)
        stack.callback(self._relays.close)
        self.relay = self._start_relay(port=0)
        launched = {name: self._launch(name) for name in RANKS}
        self.servers: dict[str, vllm.VllmServer] = {}
        for name, server in launched.items():
            stack.callback(lambda name=name: self.servers[name].stop())
            self.servers[name] = server
        for server in launched.values():
            vllm.ready(server)
        self.gateway = self._start_gateway()
        stack.callback(self.gateway.stop)
        # One client of each kind for all: to make one costs a tenth of a second of a processor that three ranks want.
        self._http = stack.enter_context(httpx.Client(base_url=self.url, timeout=PATIENCE_S))
        self._openai = stack.enter_context(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)
        )
        self.publisher = stack.enter_context(Publisher(self.relay.ready["grpc"], "policy"))
        self.version = 0
        self._numbers = itertools.count(100)
        self.until_served(0)

    # -- processes

    def _launch(self, name: str, port: int = 0) -> vllm.VllmServer:
        ranks = RANKS[name]
        return vllm.launch(name, self.directory, port=port, cores="|".join("01"[:ranks]), tensor_parallel=ranks)

    def start_again(self, name: str) -> None:
        """The server that a test killed, under its old address."""
        port = int(self.servers[name].ready["url"].rpartition(":")[2])
        self.servers[name] = vllm.ready(self._launch(name, port))

    def _start_relay(self, port: int) -> Daemon:
        pool = f"--pool-dir={self._relays.pools / 'kept'}"
        # Three ranks on two cores may keep everything else waiting for seconds: that is no death of a master.
        return self._relays.start("relay", f"--port={port}", pool, "--lease-ttl-s=10")

    def restart_relay(self) -> None:
        """Under its old address, with what the killed one left in shared memory."""
        self.relay = self._start_relay(int(self.relay.ready["grpc"].rpartition(":")[2]))

    def _start_gateway(self) -> Daemon:
        command = ["gateway", "serve", "--port=0", "--model=policy", f"--relay={self.relay.ready['grpc']}"]
        command += [f"--tokenizer={tiny_model(head_dim=VLLM_HEAD_DIM)}", "--poll-interval-s=0.2"]
        command += ["--repack-interval-s=0.2", "--queue-timeout-s=170"]
        command += [f"--engine={name}=vllm={server.ready['url']}" for name, server in self.servers.items()]
        return processes.start("gateway", command, self.directory)

    # -- versions

    def publish(self, **damage: torch.Tensor | None) -> int:
        """The next version; `damage` replaces tensors by name, or leaves them out."""
        self.version += 1
        weights = load_file(tiny_model(seed=self.version, head_dim=VLLM_HEAD_DIM) / "model.safetensors")
        tensors = {name: tensor for name, tensor in {**weights, **damage}.items() if tensor is not None}
        assert (
            self.publisher.publish(tensors, step=self.version, wait="sealed", allow_change=True).version == self.version
        )
        return self.version

    def until_served(self, version: int) -> None:
        """Every engine serves `version`."""
        wanted = dict.fromkeys(self.servers, ("serving", version))
        until(lambda: self.states() == wanted, f"version {version} on all", PATIENCE_S)

    # -- looking

    @property
    def url(self) -> str:
        return str(self.gateway.ready["url"])

    def status(self) -> dict[str, Any]:
        return self._page("/status")

    def _page(self, path: str) -> dict[str, Any]:
        page: dict[str, Any] = self._http.get(path).raise_for_status().json()
        return page

    def states(self) -> dict[str, tuple[str, int]]:
        return {e["name"]: (e["state"], e["version"]) for e in self.status()["engines"]}

    def timeline(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        while page := self._page(f"/admin/timeline?after={len(events)}")["events"]:
            events += page
        return events

    @property
    def pools(self) -> Path:
        """Where the relay keeps snapshots."""
        return self._relays.pools

    def fenced_at(self, version: int) -> list[dict[str, Any]]:
        """Engines that were fenced since `version` was there."""
        events = self.timeline()
        since = next((e["seq"] for e in events if e["kind"] == "version" and e["version"] == version), None)
        fenced = [e for e in events if e["kind"] == "engine" and e.get("state") == "fenced"]
        return [e for e in fenced if since is not None and e["seq"] > since]

    def running_well(self) -> str:
        """The one engine that streams a turn, some tokens into it; "" until then."""
        for engine in self.status()["engines"]:
            if engine["running"] and engine["kv_tokens"] > RUNNING_TOKENS:
                return str(engine["name"])
        return ""

    def stopped_in_mid_stream(self) -> str:
        """As `running_well`, its ranks stopped, so that the turn cannot end before the test goes on."""
        name = self.running_well()
        if not name:
            return ""
        for worker in self.servers[name].workers():
            worker.send_signal(signal.SIGSTOP)
        time.sleep(SETTLE_S)  # what they had sent before arrives
        if self.running_well() == name:
            return name
        for worker in self.servers[name].workers():
            worker.send_signal(signal.SIGCONT)
        return ""

    def running(self) -> list[int]:
        """Turns on each server."""
        return [engine["running"] for engine in self.status()["engines"]]

    def moves(self) -> set[tuple[str, str]]:
        """(source, destination) of every turn that was moved."""
        receipts = self._page("/admin/receipts")["receipts"]
        moves = [move for receipt in receipts for move in receipt["moves"] if move["outcome"] == "moved"]
        return {(move["source"], move["destination"]) for move in moves}

    # -- asking

    def ask(self, max_tokens: int, content: str = "What is the sum of 12 and 30?") -> Answer:
        """One greedy turn through the gateway."""
        messages: list[Any] = [{"role": "user", "content": content}]
        choice = self._openai.chat.completions.create(
            model="policy", messages=messages, max_tokens=max_tokens, temperature=0, extra_body=WANTED
        ).choices[0]
        return Answer(choice, max_tokens, content)

    def ask_meanwhile(self, max_tokens: int, count: int = 1) -> Asking:
        """Turns whose prompts have no beginning in common, for the sake of which they would share an engine."""
        contents = [f"{next(self._numbers)}: What is the sum of 12 and 30?" for _ in range(count)]
        return Asking([functools.partial(self.ask, max_tokens, content) for content in contents])

    def catch(self, caught: Callable[[], T], max_tokens: int, count: int = 1) -> tuple[Asking, T]:
        """Turns under way of which `caught` holds, and what it gave. Asked again while they end before it does."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            asking = self.ask_meanwhile(max_tokens, count)
            while asking.running:
                if found := caught():
                    return asking, found
                time.sleep(LOOK_S)
            asking.answers()
        raise AssertionError(f"no turn was caught in the act in {PATIENCE_S} s")

    async def say(self, engine: VllmEngine, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        """One greedy turn through an adapter of the test's own."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        async with engine.generate(prompt, sampling, "said", "session") as chunks:
            return [token async for chunk in chunks for token in chunk.token_ids]

    def ask_directly(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        """One greedy turn of one server, past the gateway."""
        body = {"model": "policy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{self.servers[name].ready['url']}/v1/completions", json={**body, "return_token_ids": True}, timeout=60.0
        )
        ids: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
        return ids


class Answer:
    def __init__(self, choice: Any, max_tokens: int, content: str) -> None:
        self.ids: list[int] = choice.token_ids
        self.versions = sorted({int(span["version"]) for span in choice.weight_versions})
        self._prompt, self._max_tokens = prompt_ids(content), max_tokens

    def check(self, version: int) -> None:
        """Every token is what `transformers` says with the weights of this version, and of no other."""
        assert self.versions == [version]
        check_greedy(self.ids, version, self._prompt, self._max_tokens, VLLM_HEAD_DIM)


class Asking:
    """Turns that run while the test does something to the servers."""

    def __init__(self, turns: list[Any]) -> None:
        self._answers: list[Answer | Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(turn,)) for turn in turns]
        for thread in self._threads:
            thread.start()

    def _run(self, turn: Any) -> None:
        try:
            self._answers.append(turn())
        except Exception as error:  # noqa: BLE001 (it is raised again where the test looks)
            self._answers.append(error)

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def answers(self) -> list[Answer]:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert len(self._answers) == len(self._threads), "a turn never ended"
        for answer in self._answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for answer in self._answers if isinstance(answer, Answer)]


def prompt_ids(content: str) -> tuple[int, ...]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(head_dim=VLLM_HEAD_DIM))
    messages = [{"role": "user", "content": content}]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
