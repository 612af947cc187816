"""Environments of the `verifiers` library, run by its own `vf-eval` with the gateway as their model.

`vf-eval` names each rollout in the header `X-Session-ID`, so that each is a session of the gateway: all turns of one
agent in one rollout. It knows nothing of sessions' ends. So its traces are read while it writes them, and each trace
ends its session: with its reward, or abandoned where the rollout failed.

Invariants:
- a session is finished with exactly the reward that its trace reports; the gateway answers a repeated finish alike;
- agents that an environment does not train (a judge, a modelled user) hand nothing to a trainer: their sessions are
  abandoned;
- the rollouts of one task by one agent are a group;
- what could not be finished is counted and named, and the command fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import httpx
from msgspec import Meta

from agents_env.failures import RunFailed
from agents_env.server import GATEWAY_HEADER, NO_KEY, api_key, certificates, programs_environment
from protos.options import Flag, config_from, config_options
from protos.process import setup_logging

log = logging.getLogger("agents-env")

SESSION_TIMEOUT_S = 60.0
LOOK_S = 0.5
"""Between two looks at the file of traces: it is written by another program."""
LINE_BYTES_MAX = 1 << 30
STOP_S = 20.0
"""How long `vf-eval` has to end its own programs after an interrupt, before it is killed."""


@dataclass(frozen=True, slots=True)
class VerifiersOptions:
    """Those of the command; the environment and what goes to `vf-eval` as it stands are its arguments."""

    gateway: Annotated[str, Flag(metavar="URL"), "Address of the gateway."]
    model: Annotated[str, "The model's name at the gateway."] = "policy"
    client: Annotated[Literal["eval", "train"], "client.type of vf-eval: eval sends text, train token ids."] = "eval"
    tokenizer: Annotated[
        str | None,
        Flag(metavar="DIR"),
        "Tokenizer of the model: --client train renders and tokenizes with it.",
    ] = None
    tasks: Annotated[int, Meta(ge=1), "How many of the environment's tasks."] = 1
    rollouts: Annotated[int, Meta(ge=1), "Rollouts of each task."] = 1
    out: Annotated[Path, click.Path(path_type=Path), "Directory of vf-eval's traces."] = Path("outputs")
    program: Annotated[str, Flag("--vf-eval", metavar="PATH"), "The command of verifiers 0.4."] = "vf-eval"

    def command(self, env: str, extra: Sequence[str]) -> list[str]:
        """The command line of `vf-eval`."""
        train = [] if self.client == "eval" else ["--client.type", "train"]
        if self.tokenizer is not None:
            train += ["--client.renderer-model-name", self.tokenizer]
        return [
            self.program,
            env,
            *train,
            *("--client.base-url", f"{self.gateway.rstrip('/')}/v1", "--client.api-key-var", "OPENAI_API_KEY"),
            *("-m", self.model, "-n", str(self.tasks), "-r", str(self.rollouts), "-o", str(self.out), "--no-push"),
            *extra,
        ]


TRUNCATED = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
"""The stop conditions by which verifiers 0.4 ends an agent itself (`Trace.is_truncated`)."""
METRICS_MAX = 256
"""Of one session, as the gateway takes them."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ends. `reward` None: its rollout failed, for `why`, or its agent is not `trained`. `seat`: the task
    and the agent, whose rollouts are a group."""

    session_id: str
    reward: float | None
    why: str = ""
    trained: bool = True
    truncated: bool = False
    seat: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Ends:
    """Counts of sessions by how they ended. `failed`: the gateway did not take the end; `members`: the finished ones of
    each group of the `run`."""

    run: str
    finished: int = 0
    abandoned: int = 0
    untrained: int = 0
    failed: int = 0
    rewards: float = 0.0
    members: Counter[str] = field(default_factory=Counter)


def endings(line: str) -> list[Ending]:
    """The ends of the sessions of one episode, from its line of `traces.jsonl`. Raises ValueError for another form."""
    episode = json.loads(line)
    if not isinstance(episode, dict) or not isinstance(episode.get("traces"), list):
        raise ValueError("not an episode of verifiers 0.4: no list of traces")
    seats: Counter[str] = Counter()  # an agent may play more than once in an episode
    return [_ending(trace, seats) for trace in episode["traces"] if trace.get("calls")]


def _ending(trace: Mapping[str, Any], seats: Counter[str]) -> Ending:
    agent, task = trace["agent"]["name"], trace["task"]
    seats[agent] += 1
    tags = {"task": str(task.get("key") or task.get("hash") or ""), "agent": agent}
    if not trace["agent"]["trainable"]:
        return Ending(trace["id"], None, f"agent {agent} is not trained", trained=False)
    if not trace.get("ok"):
        why = "; ".join(str(error) for error in trace.get("errors") or ()) or str(trace.get("stop_condition"))
        return Ending(trace["id"], None, why[:300])
    rewards = {name: reward for name, reward in (trace.get("rewards") or {}).items() if reward is not None}
    metrics = {f"reward/{name}": reward["score"] for name, reward in rewards.items()} | (trace.get("metrics") or {})
    total = _number(sum(_number(r["score"]) * _number(r["weight"]) for r in rewards.values()))
    if not math.isfinite(total):
        return Ending(trace["id"], None, f"a reward is no finite number: {rewards!r:.200}")
    return Ending(
        trace["id"],
        total,
        truncated=_is_truncated(trace),
        seat=f"{tags['task']}/{agent}/{seats[agent]}",
        tags=tags,
        metrics=_finite(trace["id"], metrics),
    )


def _number(value: Any) -> float:
    """NaN for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _finite(session_id: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers; the others, and those beyond `METRICS_MAX`, are named."""
    found = {name: _number(value) for name, value in metrics.items() if value is not None}
    kept = dict(islice(((name, value) for name, value in found.items() if math.isfinite(value)), METRICS_MAX))
    if lost := sorted(found.keys() - kept.keys()):
        log.warning("session %s: not taken as metrics: %s", session_id, ", ".join(lost)[:300])
    return kept


def _is_truncated(trace: Mapping[str, Any]) -> bool:
    last: Mapping[str, Any] = next((call for call in reversed(trace["calls"]) if call.get("error") is None), {})
    return trace.get("stop_condition") in TRUNCATED or last.get("finish_reason") == "length"


class Traces:
    """Reads the episodes that were added to `traces.jsonl` below a folder since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[Path, int]()

    def new(self) -> Iterator[str]:
        for path in sorted(self._folder.glob("**/traces.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                while (line := file.readline(LINE_BYTES_MAX)).endswith(b"\n"):
                    self._read[path] = file.tell()
                    yield line.decode()


async def run(options: VerifiersOptions, env: str, extra: Sequence[str] = ()) -> Ends:
    """Runs `vf-eval` to its end, and ends the sessions of its rollouts as their traces come.

    Raises RunFailed when it cannot be started, fails, or when a session's end was not taken.
    """
    if options.client == "train" and options.tokenizer is None:
        raise RunFailed("--client train tokenizes by itself: pass --tokenizer, the model's directory or name")
    options.out.mkdir(parents=True, exist_ok=True)
    traces = Traces(options.out)
    for _ in traces.new():  # of an earlier run
        pass
    ends = Ends(secrets.token_hex(4))
    key = api_key()  # its sessions belong to whose key makes their calls, and are ended below with the same
    environment = {**programs_environment(), "OPENAI_API_KEY": key}
    credentials = {} if key == NO_KEY else {"Authorization": f"Bearer {key}"}
    trusted = certificates()  # never by a proxy; but SSL_CERT_FILE counts
    async with httpx.AsyncClient(
        base_url=options.gateway, timeout=SESSION_TIMEOUT_S, trust_env=False, verify=trusted, headers=credentials
    ) as http:
        try:
            process = await asyncio.create_subprocess_exec(
                *options.command(env, extra), env=environment, start_new_session=True
            )
        except OSError as error:
            raise RunFailed(
                f"{options.program} cannot be started: {error}; install verifiers 0.4 in an environment of its own, "
                "and pass --vf-eval PATH"
            ) from error
        try:
            ended = asyncio.create_task(process.wait())
            while not (await asyncio.wait([ended], timeout=LOOK_S))[0]:
                await _end_sessions(http, traces, ends)
        finally:
            await _stop(process)
            await _end_sessions(http, traces, ends)
    log.info(
        "%d sessions finished (mean reward %.3f), %d abandoned%s",
        ends.finished,
        ends.rewards / max(1, ends.finished),
        ends.abandoned,
        f", {ends.untrained} of agents that are not trained" if ends.untrained else "",
    )
    if short := sum(members < options.rollouts for members in ends.members.values()):
        log.warning("%d groups have less than %d members: no reader of whole groups gets them", short, options.rollouts)
    if process.returncode:
        raise RunFailed(f"{options.program} ended with status {process.returncode}: its own output says why")
    if ends.failed:
        raise RunFailed(f"{ends.failed} sessions could not be ended: the log names them")
    return ends


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Interrupts `vf-eval` and all that it started; kills what is left."""
    for number, patience_s in ((signal.SIGINT, STOP_S), (signal.SIGKILL, STOP_S)):
        if process.returncode is not None:
            return
        os.killpg(process.pid, number)
        try:
            await asyncio.wait_for(process.wait(), patience_s)
        except TimeoutError:
            log.warning("vf-eval did not end within %g s of %s", patience_s, signal.Signals(number).name)


async def _end_sessions(http: httpx.AsyncClient, traces: Traces, ends: Ends) -> None:
    for line in traces.new():
        try:
            found = endings(line)
        except (ValueError, KeyError, TypeError) as error:
            ends.failed += 1
            log.error("an episode cannot be read: %s: %s; is this verifiers 0.4?", type(error).__name__, error)
            continue
        for ending in found:
            await _end(http, ending, ends)


def _finish(ending: Ending, ends: Ends) -> Mapping[str, Any]:
    """The body of its finish. The session was made by its first call, so that it has no group and no tags yet."""
    group = f"{ends.run}-{hashlib.blake2b(ending.seat.encode(), digest_size=8).hexdigest()}"
    place = {"group_id": group, "sample_index": ends.members[group], "tags": dict(ending.tags)} if ending.seat else {}
    status = "truncated" if ending.truncated else "completed"
    return {"reward": ending.reward, "status": status, "metrics": dict(ending.metrics), **place}


async def _end(http: httpx.AsyncClient, ending: Ending, ends: Ends) -> None:
    path = f"/sessions/{ending.session_id}/{'abandon' if ending.reward is None else 'finish'}"
    body = {"reason": ending.why} if ending.reward is None else _finish(ending, ends)
    try:
        answer = await http.post(path, json=body)
        if (elsewhere := answer.headers.get(GATEWAY_HEADER)) is not None:  # of a 421: where the session is
            answer = await http.post(elsewhere + path, json=body)
        never_began = ending.reward is None and answer.status_code == httpx.codes.NOT_FOUND
        if not never_began:  # all its calls were refused, such as images: there is nothing to abandon
            answer.raise_for_status()
    except httpx.HTTPError as error:
        ends.failed += 1
        log.error("session %s was not ended: %s", ending.session_id, str(error) or type(error).__name__)
        return
    if not ending.trained:
        ends.untrained += 1
        return
    if ending.reward is None:
        ends.abandoned += 1
        log.warning("session %s was abandoned: %s", ending.session_id, ending.why)
        return
    ends.finished += 1
    ends.rewards += ending.reward
    if "group_id" in body:
        ends.members[body["group_id"]] += 1


@click.command("verifiers", context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("env")
@config_options(VerifiersOptions)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def command(env: str, extra: tuple[str, ...], **values: Any) -> None:
    """Roll out ENV, an environment of the verifiers library, by its own `vf-eval`.

    \b
    agents-env verifiers kuhn_poker --gateway http://127.0.0.1:8080 --tasks 4 --rollouts 8 \\
      -- --env.player0.runtime.type subprocess --env.player1.runtime.type subprocess

    Each rollout of an agent is a session at the gateway, finished with the reward of its trace. What stands behind `--`
    goes to vf-eval. Its default runtime is a remote sandbox: name `subprocess` for programs on this machine.
    """
    setup_logging("info", "text")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request otherwise
    try:
        asyncio.run(_until_terminated(run(config_from(VerifiersOptions, values), env, extra)))
    except RunFailed as error:
        log.error("%s", error)
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


async def _until_terminated(work: Coroutine[Any, Any, Ends]) -> None:
    """Runs until its end, or until SIGTERM, which ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work
