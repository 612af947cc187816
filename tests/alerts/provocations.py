"""What makes each alert fire: an act at real daemons, and where the alert has to show."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import resource
import sqlite3
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from gateway.config import GatewayConfig
from gateway.experience.shared import SENDING_BYTES_MAX
from gateway.store.database import DATABASE_NAME
from paramserver.client import RelayClient, TensorSource, publish
from paramserver.memory import stored
from tests.alerts.fleet import MODEL, Fleet
from tests.support.engine_port import context_of
from tests.support.fleet import until
from tests.support.scripted_engine import Cut
from trainer_client import Publisher


@dataclass(frozen=True, slots=True)
class Provocation:
    """`alerts`: each with the daemon, or the model, that it has to name. `beside`: it takes long, and its daemons are
    its own, so the others are made meanwhile."""

    how: str
    act: Callable[[Fleet], None]
    alerts: Mapping[str, str]
    beside: bool = False


def take_engine_away(fleet: Fleet) -> None:
    fleet.call("DELETE", "empty", "/admin/engines/well").raise_for_status()


def cut_half_of_all_turns(fleet: Fleet) -> None:
    fleet.keep_on(lambda number: fleet.complete("cuts", f"cut-{number}", max_tokens=64), 0.1)


def lose_a_turn(fleet: Fleet) -> None:
    """Its engine is killed in its middle, and there is no other."""
    done = threading.Event()

    def ask() -> None:
        assert fleet.complete("losing", "lost", max_tokens=400).status_code >= 500
        done.set()

    fleet.in_background(ask)
    until(lambda: tokens(fleet, "losing") > 0, "a running turn")
    fleet.processes["last"].kill()
    until(done.is_set, "the loss of the turn")


def tokens(fleet: Fleet, gateway: str) -> int:
    status = fleet.call("GET", gateway, "/status").json()
    return int(status["counters"]["tokens_generated"])


def hold_turns(fleet: Fleet) -> None:
    """One runs and gets no token; one more waits for its place."""
    fleet.engines["held"].hold_at = 2
    for name in ("one", "two"):
        fleet.in_background(lambda name=name: fleet.complete("held", name, timeout_s=900.0))  # type: ignore[misc]


def mislead(fleet: Fleet) -> None:
    """The last event says so; one that says it first is cut, and none of its tokens taken."""
    fleet.in_background(lambda: fleet.complete("misled", "misled", max_tokens=64))


def abandon_sessions(fleet: Fleet) -> None:
    for number in range(12):
        fleet.post("tasks", "/sessions", session_id=f"left-{number}").raise_for_status()
        fleet.post("tasks", f"/sessions/left-{number}/abandon").raise_for_status()


def fail_a_task(fleet: Fleet) -> None:
    task = {"data": {"prompt": "2 + 2?"}, "attempts_max": 1}
    fleet.post("tasks", "/tasks", pool="failing", tasks=[task]).raise_for_status()
    leased = fleet.post("tasks", "/tasks/lease", pool="failing", runner="r").raise_for_status().json()["leases"]
    fleet.post("tasks", "/tasks/fail", lease_id=leased[0]["lease_id"], error="it fails").raise_for_status()


def let_leases_expire(fleet: Fleet) -> None:
    """Of a runner that died; another one gets its samples."""
    task = {"data": {"prompt": "3 + 3?"}, "group_size": 12}
    fleet.post("tasks", "/tasks", pool="dying", tasks=[task]).raise_for_status()
    for runner, wait_s in (("dead", 0.0), ("next", 30.0)):
        asked = {"pool": "dying", "runner": runner, "count": 12, "lease_s": 0.5, "wait_s": wait_s}
        assert len(fleet.post("tasks", "/tasks/lease", **asked).raise_for_status().json()["leases"]) == 12


def lose_all_runners(fleet: Fleet) -> None:
    """After the last one leased, nobody comes."""
    fleet.post("text", "/tasks", tasks=[{"data": {"prompt": "4 + 4?"}}]).raise_for_status()
    asked = {"runner": "the last", "lease_s": 1.0}
    assert fleet.post("text", "/tasks/lease", **asked).raise_for_status().json()["leases"]


def break_the_store(fleet: Fleet) -> None:
    """Its files cannot grow any more, as on a full disk."""
    pid = fleet.gateways["tasks"].process.pid
    fleet.complete("tasks", "on-disk").raise_for_status()
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))
    assert fleet.post("tasks", "/sessions/on-disk/finish", reward=1.0).status_code == 503


COPIES = int(GatewayConfig.__dataclass_fields__["experience_max"].default) * 3 // 4 + 1
COPY_ROWS = """
WITH RECURSIVE copy(number) AS (VALUES (1) UNION ALL SELECT number + 1 FROM copy WHERE number < ?)
INSERT INTO trajectories(seq, session_id, group_id, oldest_version, facts)
SELECT seq + number, 'copy-' || number, 'copy-' || number, oldest_version, facts FROM trajectories, copy"""
COPY_BODIES = """
INSERT INTO trajectory_bodies SELECT copy.seq, body FROM trajectory_bodies AS first, trajectories AS copy
WHERE copy.seq > first.seq"""


def hoard_trajectories(fleet: Fleet) -> None:
    """One is finished, and copied in the database while the gateway is down: to finish as many takes half an hour."""
    fleet.complete("hoard", "first").raise_for_status()
    fleet.post("hoard", "/sessions/first/finish", reward=1.0).raise_for_status()
    assert fleet.gateways["hoard"].stop() == 0
    with contextlib.closing(sqlite3.connect(fleet.directory / "hoard" / DATABASE_NAME)) as database, database:
        database.execute(COPY_ROWS, (COPIES,))
        database.execute(COPY_BODIES)
    fleet.start_gateway("hoard")


def cut_texts(fleet: Fleet) -> None:
    fleet.engines["text"].always = Cut("closed", 1)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 4}

    def ask(number: int) -> None:
        with contextlib.suppress(httpx.TransportError):  # the stream breaks off, as it should
            fleet.post("text", "/v1/chat/completions", **body)

    fleet.keep_on(ask, 0.3)


WAITING = 140
TAGS = {f"tag-{number}": "\N{MUSICAL SYMBOL G CLEF}" * 4096 for number in range(64)}
"""As much as a session takes: a megabyte in UTF-8, so that few sessions make half of what may wait."""


def finish_without_redis(fleet: Fleet) -> None:
    """The clients leave before their answers; their sessions have ended all the same."""
    assert WAITING << 20 > SENDING_BYTES_MAX // 2
    names = [f"waits-{number}" for number in range(WAITING)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: begin(fleet, name), names))
        fleet.processes["redis"].kill()
        list(threads.map(lambda name: end(fleet, name), names))


def begin(fleet: Fleet, name: str) -> None:
    fleet.post("shared", "/sessions", 180.0, session_id=name, tags=TAGS).raise_for_status()
    fleet.complete("shared", name, timeout_s=180.0).raise_for_status()


def end(fleet: Fleet, name: str) -> None:
    """Again, if it was not heard: the gateway is busy with the others."""
    while fleet.call("GET", "shared", f"/sessions/{name}", 180.0).raise_for_status().json()["state"] == "live":
        with contextlib.suppress(httpx.ReadTimeout):
            fleet.post("shared", f"/sessions/{name}/finish", 1.0, reward=1.0)


def fail_loads(fleet: Fleet) -> None:
    """Of five versions, one after the other. Besides: two are pinned at a relay that has no room for more, a process
    maps one that retires, and the disk of the master takes none."""
    fleet.engines["loads"].answers["/update_weights"] = 500
    snapshots = fleet.directory / "spill" / "snapshots"
    until(lambda: stored.find(fleet.directory / "spill"), "the first version on disk")
    snapshots.rename(snapshots.with_name("before"))
    snapshots.write_text("in the way")
    pin(fleet, 1)
    fleet.publish(2)
    pin(fleet, 2)
    asyncio.run(map_version(fleet, 2))  # the first does not retire: the gateway keeps it for the engine to go back to
    for step in range(3, 7):
        fleet.publish(step)


async def map_version(fleet: Fleet, version: int) -> None:
    async with RelayClient(fleet.relays["master"].ready["grpc"]) as relay:
        lease = await relay.acquire(MODEL, version, holder="a notebook")
        [path] = lease.path.glob("*.safetensors")
        with path.open("rb") as file:
            fleet.mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        await relay.release(lease)


def pin(fleet: Fleet, version: int) -> None:
    """At the relay that has room for two."""

    async def acquire() -> bool:
        async with RelayClient(fleet.relays["full"].ready["grpc"]) as relay:
            if version not in (await relay.status()).held.get(MODEL, ()):
                return False
            fleet.pinned.append(await relay.acquire(MODEL, version, holder="a session", ttl_s=3600.0))
            return True

    until(lambda: asyncio.run(acquire()), f"version {version} at the full relay")


def leave_a_seal_in_doubt(fleet: Fleet) -> None:
    """etcd's answers stay away between the announcement of a version and its seal."""
    copied, go_on, sealing = threading.Event(), threading.Event(), threading.Event()
    array = np.ones(1000, np.float32)
    view = memoryview(array.view(np.uint8))  # type: ignore[arg-type]

    def read() -> memoryview:
        copied.set()
        assert go_on.wait(60.0)
        return view

    async def publishes() -> None:
        async with RelayClient(fleet.relays["doubtful"].ready["grpc"], timeout_s=60.0) as relay:
            await publish(relay, MODEL, [TensorSource("w", "F32", (1000,), read)], step=1, run="r")
            sealing.set()
            await asyncio.to_thread(fleet.ended.wait)  # a claim that ends would end the doubt

    fleet.in_background(lambda: asyncio.run(publishes()))
    until(copied.is_set, "the copy's begin")
    log = fleet.relays["doubtful"].log
    until(lambda: f"version 1 of {MODEL} is in the registry" in log(), "the announcement")
    fleet.to_etcd.hold("answers")
    go_on.set()
    until(sealing.is_set, "the copy's end")


def publish_over_a_slow_link(fleet: Fleet) -> None:
    """Two minutes of bytes for one version."""
    weights = {"w": np.ones((32 << 20) // 4, np.float32)}
    with Publisher(fleet.relays["limited"].ready["grpc"], "slow", timeout_s=60.0) as publisher:
        publisher.publish(weights, step=1, wait="sealed")


def limit_files(fleet: Fleet) -> None:
    """The process may open few more than it has."""
    pid = fleet.gateways["empty"].process.pid
    opened = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened + 4, hard))


def let_a_certificate_expire(fleet: Fleet) -> None:
    """Soon: one for nine days takes the place of the relay's."""
    fleet.credentials.renew(["relay"], days=9)
    metrics = f"https://{fleet.instance('relay secured')}/metrics"
    reader = context_of(fleet.reader, fleet.reader)

    def left_s() -> float:
        lines = httpx.get(metrics, verify=reader).raise_for_status().text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("laminar_relay_certificate_expiry"))

    until(lambda: left_s() < 10 * 86400, "the new certificate in use")


def copy_half_a_key(fleet: Fleet) -> None:
    key = fleet.credentials.directory / "relay" / "key.pem"
    key.write_bytes(key.read_bytes()[:64])


PROVOCATIONS = (
    Provocation(
        "a certificate for nine days",
        let_a_certificate_expire,
        {"LaminarCertificateExpires": "relay secured"},
    ),
    Provocation("half a key is copied", copy_half_a_key, {"LaminarCredentialsFail": "relay secured"}),
    Provocation("kill -9 of a relay", lambda fleet: fleet.relays["gone"].kill(), {"LaminarRelayDown": "relay gone"}),
    Provocation(
        "no etcd answer after a seal was sent",
        leave_a_seal_in_doubt,
        {"LaminarSealInDoubt": "relay doubtful", "LaminarRelayWithoutEtcd": "relay doubtful"},
    ),
    Provocation(
        "32 MiB at 256 KiB/s, and no version after it",
        publish_over_a_slow_link,
        {"LaminarTransferStands": "relay fetching", "LaminarNoNewVersion": "model slow"},
    ),
    Provocation(
        "five versions refused; two pinned; one mapped; no disk",
        fail_loads,
        {
            "LaminarLoadsFail": "gateway loads",
            "LaminarEngineBehind": "gateway loads",
            "LaminarRelayBehind": "relay full",
            "LaminarPoolFull": "relay full",
            "LaminarMemoryQuarantined": "relay master",
            "LaminarSpillFails": "relay master",
        },
    ),
    Provocation("half of the streams are cut", cut_half_of_all_turns, {"LaminarManyCuts": "gateway cuts"}),
    Provocation(
        "kill -9 of one of two engines",
        lambda fleet: fleet.processes["mortal"].kill(),
        {"LaminarEngineDown": "gateway cuts"},
    ),
    Provocation(
        "an engine sends nothing; a turn behind it",
        hold_turns,
        {"LaminarNoTokens": "gateway held", "LaminarTurnsWait": "gateway held"},
    ),
    Provocation("an engine reports version 7", mislead, {"LaminarWrongVersionSampled": "gateway misled"}),
    Provocation("kill -9 of the only engine in a turn", lose_a_turn, {"LaminarTurnsLost": "gateway losing"}),
    Provocation("streams of text are cut", cut_texts, {"LaminarTextFails": "gateway text"}),
    Provocation("12 sessions abandoned", abandon_sessions, {"LaminarSessionsAbandoned": "gateway tasks"}),
    Provocation("a sample fails at its last attempt", fail_a_task, {"LaminarTasksGivenUp": "gateway tasks"}),
    Provocation("a runner lets 12 leases expire", let_leases_expire, {"LaminarTaskLeasesExpire": "gateway tasks"}),
    Provocation("a runner leases a sample, and is gone", lose_all_runners, {"LaminarRunnersGone": "gateway text"}),
    Provocation("--data takes no byte more", break_the_store, {"LaminarStoreFails": "gateway tasks"}),
    Provocation(
        "kill -9 of the Redis, then 140 finishes of 1 MB",
        finish_without_redis,
        {"LaminarSharedExperienceFails": "gateway shared", "LaminarSharedExperienceWaits": "gateway shared"},
        beside=True,
    ),
    Provocation("49,154 trajectories in the buffer", hoard_trajectories, {"LaminarExperienceWaits": "gateway hoard"}),
    Provocation("its engine removed", take_engine_away, {"LaminarNoEngineServes": "gateway empty"}),
    Provocation("four more files allowed", limit_files, {"LaminarFilesNearlyOut": "gateway empty"}),
    Provocation(
        "kill -9 of a gateway", lambda fleet: fleet.gateways["gone"].kill(), {"LaminarGatewayDown": "gateway gone"}
    ),
)
