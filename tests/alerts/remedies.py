"""What ends alerts: what docs/alerts.md says to do, done at real daemons. The provocation comes before.

Alerts that have none here end by themselves: what was counted leaves the range of the rule, or the slow transfer ends.
Every alert that has one fires until then, however long the test takes.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass

from paramserver.client import RelayClient
from paramserver.memory import stored
from tests.alerts.fleet import Fleet
from tests.support.fleet import until
from trainer_client import ExperienceReader


@dataclass(frozen=True, slots=True)
class Remedy:
    how: str
    act: Callable[[Fleet], None]
    alerts: tuple[str, ...]


def renew_credentials(fleet: Fleet) -> None:
    fleet.credentials.renew([], days=365)


def add_engine(fleet: Fleet, gateway: str) -> None:
    body = {"name": "spare", "kind": "vllm", "url": fleet.url("well")}
    fleet.post(gateway, "/admin/engines", **body).raise_for_status()


def remove_engine(fleet: Fleet, gateway: str, engine: str) -> None:
    fleet.call("DELETE", gateway, f"/admin/engines/{engine}", 180.0).raise_for_status()


def replace_engine(fleet: Fleet, gateway: str, engine: str) -> None:
    """Its turns continue on another one."""
    add_engine(fleet, gateway)
    remove_engine(fleet, gateway, engine)


def allow_files(fleet: Fleet) -> None:
    pid = fleet.gateways["empty"].process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))


def make_room_on_disk(fleet: Fleet) -> None:
    """The gateway goes on by itself, and has written what waited when it reports no failure."""
    pid = fleet.gateways["tasks"].process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def evict_all(fleet: Fleet) -> None:
    with ExperienceReader(str(fleet.gateways["hoard"].ready["url"])) as reader:
        reader.evict(lambda rows: [row.session_id for row in rows])


def runners_come_back(fleet: Fleet) -> None:
    """One gets the sample whose lease ran out, and finishes it."""
    asked = {"runner": "another", "wait_s": 30.0}
    [lease] = fleet.post("text", "/tasks/lease", **asked).raise_for_status().json()["leases"]
    fleet.post("text", "/tasks/finish", lease_id=lease["lease_id"], reward=1.0).raise_for_status()


def end_all_that_is_in_the_way(fleet: Fleet) -> None:
    """Of new versions: the engine loads again, the disk takes them, nobody pins or maps old ones. The next version then
    comes everywhere."""
    snapshots = fleet.directory / "spill" / "snapshots"
    snapshots.unlink()
    snapshots.with_name("before").rename(snapshots)
    del fleet.engines["loads"].answers["/update_weights"]
    fleet.mapped.pop().close()
    asyncio.run(unpin(fleet))
    fleet.publish(7)
    until(lambda: any(one.manifest.version == 7 for one in stored.find(snapshots.parent)), "version 7 on disk")


async def unpin(fleet: Fleet) -> None:
    async with RelayClient(fleet.relays["full"].ready["grpc"]) as relay:
        while fleet.pinned:
            await relay.release(fleet.pinned.pop())


def drop_model(fleet: Fleet) -> None:
    async def drop() -> None:
        async with RelayClient(fleet.relays["limited"].ready["grpc"]) as relay:
            assert await relay.drop("slow") == [1]

    asyncio.run(drop())


REMEDIES = (
    Remedy(
        "credentials renewed",
        renew_credentials,
        ("LaminarCertificateExpires", "LaminarCredentialsFail"),
    ),
    Remedy("started again", lambda fleet: fleet.start_relay("gone"), ("LaminarRelayDown",)),
    Remedy("started again", lambda fleet: fleet.start_gateway("gone"), ("LaminarGatewayDown",)),
    Remedy(
        "etcd's answers come",
        lambda fleet: fleet.to_etcd.release(),
        ("LaminarSealInDoubt", "LaminarRelayWithoutEtcd"),
    ),
    Remedy("that model dropped", drop_model, ("LaminarNoNewVersion",)),
    Remedy(
        "disk, engine, pins and mapping mended",
        end_all_that_is_in_the_way,
        ("LaminarEngineBehind", "LaminarRelayBehind", "LaminarPoolFull", "LaminarMemoryQuarantined"),
    ),
    Remedy("that engine removed", lambda fleet: remove_engine(fleet, "cuts", "mortal"), ("LaminarEngineDown",)),
    Remedy("another engine instead", lambda fleet: replace_engine(fleet, "cuts", "cutting"), ("LaminarManyCuts",)),
    Remedy(
        "another engine instead",
        lambda fleet: replace_engine(fleet, "held", "held"),
        ("LaminarNoTokens", "LaminarTurnsWait"),
    ),
    Remedy("streams end", lambda fleet: setattr(fleet.engines["text"], "always", None), ("LaminarTextFails",)),
    Remedy("a runner comes", runners_come_back, ("LaminarRunnersGone",)),
    Remedy("room on the disk", make_room_on_disk, ("LaminarStoreFails",)),
    Remedy(
        "the Redis started again",
        lambda fleet: fleet.start_redis(),
        ("LaminarSharedExperienceFails", "LaminarSharedExperienceWaits"),
    ),
    Remedy("all evicted", evict_all, ("LaminarExperienceWaits",)),
    Remedy("an engine added", lambda fleet: add_engine(fleet, "empty"), ("LaminarNoEngineServes",)),
    Remedy("more files allowed", allow_files, ("LaminarFilesNearlyOut",)),
)
