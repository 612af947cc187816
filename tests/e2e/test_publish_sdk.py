"""The trainer SDK against real relays and a real etcd: what was published is what an engine reads."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from paramserver.client import RelayClient, RelayStatus
from protos.errors import Conflict, InDoubt, InvalidRequest, LaminarError, NotFound, TooLarge, Unavailable, UnknownModel
from tests.support.processes import Daemon, start
from tests.support.relays import Relays
from trainer_client import AsyncPublisher, Publisher, Ticket
from trainer_client.sources import NamedTensors

pytestmark = pytest.mark.slow

POOL = "64MiB"


@dataclass
class Tier:
    """An etcd and two relays in a chain; `relays[0]` is where publishers connect."""

    etcd: Daemon
    relays: list[Daemon]

    def address(self, index: int) -> str:
        return str(self.relays[index].ready["grpc"])


@contextlib.contextmanager
def running_tier(directory: Path, count: int) -> Iterator[Tier]:
    with contextlib.ExitStack() as stack:

        def launch(name: str, *arguments: str) -> Daemon:
            daemon = start(name, ["paramserver", *arguments], directory)
            stack.callback(daemon.stop)
            return daemon

        etcd = launch("etcd", "etcd")
        options = ("--etcd", etcd.ready["etcd"], "--pool-bytes", POOL)
        relays = [
            launch(
                f"r{i}", "serve", "--name", f"{directory.name}-r{i}", *options, "--pool-dir", str(directory / f"r{i}")
            )
            for i in range(count)
        ]
        yield Tier(etcd, relays)


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    with running_tier(tmp_path_factory.mktemp("tier"), count=2) as tier:
        yield tier


@dataclass
class Snapshot:
    """What an engine finds at a relay: the tensors, and the header's metadata."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]


async def _read(address: str, model: str, version: int) -> Snapshot:
    async with RelayClient(address) as relay:
        lease = await relay.acquire(model, version, holder="test")
        snapshot = Snapshot({}, {})
        for path in sorted(lease.path.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                snapshot.metadata.update(file.metadata() or {})
                snapshot.tensors.update({name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
        await relay.release(lease)
        return snapshot


def when_free(publisher: Publisher, tensors: NamedTensors, step: int) -> Ticket:
    """Publishes once the model is free: its master hears a moment later that the last publisher has closed."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return publisher.publish(tensors, step=step, wait="sealed")
        except Conflict:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def read(tier: Tier, ticket: Ticket, relay: int = 1) -> Snapshot:
    return asyncio.run(_read(tier.address(relay), ticket.model, ticket.version))


class Net(torch.nn.Module):
    """Tied embedding and head, several dtypes, a scalar and an empty buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(32, 16, dtype=torch.bfloat16)
        self.layer = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("transposed", torch.arange(12, dtype=torch.float16).reshape(3, 4).T)


@pytest.mark.parametrize("force_tcp", [False, True], ids=["shared-memory", "tcp"])
def test_a_state_dict_arrives_at_every_relay_bit_for_bit(tier: Tier, force_tcp: bool) -> None:
    net = Net()
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with Publisher(tier.address(0), f"net-{force_tcp}", force_tcp=force_tcp) as publisher:
        ticket = publisher.publish(net.state_dict(), step=3)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()  # allowed from *copied* on
        ticket.wait_all()
        assert ticket.stage() == "all"
        assert len(ticket.holders()) == 2
        assert (ticket.step, ticket.run) == (3, publisher.run)
    for relay in (0, 1):
        snapshot = read(tier, ticket, relay)
        assert snapshot.metadata == {"format": "pt", "tied:head.weight": "embed.weight"}
        assert set(snapshot.tensors) == set(expected) - {"head.weight"}
        for name, tensor in snapshot.tensors.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name]), name


def test_versions_grow_within_a_run_and_above_it_in_the_next(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    versions, runs = [], list[str]()
    for first_step in (90, 50):
        with Publisher(tier.address(0), "grows", wait="sealed") as publisher:
            runs.append(publisher.run)
            for step in (first_step, first_step + 1):
                ticket = when_free(publisher, [("w", np.full(4, step, np.float32))], step)
                versions.append(ticket.version)
                assert ticket.stage() in ("sealed", "k_relays", "all")
            state = publisher.state_dict()
    assert versions == sorted(set(versions))
    assert len(set(runs)) == 2
    told = [record.message for record in caplog.records if "this run begins from its own weights" in record.message]
    assert len(told) == 1, "the second publisher resumed nothing"
    assert f"there are versions to {versions[1]} of run {runs[0]}" in told[0]
    with Publisher(tier.address(0), "grows", on_old_run="refuse") as publisher:
        with pytest.raises(Conflict, match=f"versions to {versions[3]} of run {runs[1]}"):
            publisher.publish([("w", np.zeros(4))], step=0)
        requeued = Publisher(tier.address(0), "grows", run=runs[1], on_old_run="refuse")
        with requeued, pytest.raises(Conflict, match=f"versions to {versions[3]} of run {runs[1]}"):
            requeued.publish([("w", np.zeros(4))], step=0)
        publisher.load_state_dict(state)
        versions.append(when_free(publisher, [("w", np.full(4, 51, np.float32))], 52).version)
    assert versions[4] == versions[3] + 1, "the refused one took no number"
    ticket.model = "grows"
    assert read(tier, ticket, relay=0).tensors["w"].tolist() == [51.0] * 4


def test_a_relay_that_holds_nothing_knows_of_the_old_run_too(relays: Relays) -> None:
    tensors = {"w": np.zeros(4 << 20, np.uint8)}
    with Publisher(relays.start("a").ready["grpc"]) as publisher:
        publisher.publish(tensors, step=0, wait="sealed")
    empty = relays.start("b", pool_bytes="2MiB")
    beside = Publisher(empty.ready["grpc"], on_old_run="refuse")
    with beside, pytest.raises(Conflict, match="versions to 1 of run unknown"):
        beside.publish(tensors, step=0)


async def test_the_asynchronous_face_publishes_concurrently_for_two_models(tier: Tier) -> None:
    async with AsyncPublisher(tier.address(0), "actor") as actor, AsyncPublisher(tier.address(1), "critic") as critic:
        tickets = await asyncio.gather(
            actor.publish({"a": torch.ones(3)}, step=1, wait="all"),
            critic.publish({"c": torch.zeros(3)}, step=1, wait=2),
        )
        assert [await ticket.stage() for ticket in tickets] == ["all", "all"]
    assert (await _read(tier.address(1), "actor", tickets[0].version)).tensors["a"].tolist() == [1.0] * 3


async def test_a_publish_under_a_name_that_no_gateway_follows_is_told(
    tier: Tier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways follow the relays beside their engines: the one that the trainer publishes to may have no watcher. The
    publish does not wait for what shows that."""
    async with RelayClient(tier.address(1)) as gateway, AsyncPublisher(tier.address(0), "followed") as publisher:
        watching = gateway.watch("followed")
        coming = asyncio.ensure_future(anext(watching))
        await publisher.publish({"w": torch.ones(2)}, step=1)
        await coming
        assert "nobody watches" not in caplog.text
        async with AsyncPublisher(tier.address(0), "folowed") as mistyped:
            published, statuses = asyncio.Event(), mistyped._relay.statuses

            async def late() -> list[RelayStatus]:
                await published.wait()
                return await statuses()

            monkeypatch.setattr(mistyped._relay, "statuses", late)
            async with asyncio.timeout(60):
                for step in (1, 2):
                    await mistyped.publish({"w": torch.ones(2)}, step=step)
            published.set()
        told = [record.message for record in caplog.records if "nobody watches" in record.message]
        assert told == [
            "nobody watches model 'folowed' at 2 relays, where 'followed' is watched: no engine is served with what is "
            "published"
        ]
        await watching.aclose()  # type: ignore[attr-defined]


async def test_publishes_of_one_run_take_turns(tier: Tier) -> None:
    async with AsyncPublisher(tier.address(0), "turns") as publisher:
        made = (publisher.publish({"w": torch.full((4,), n)}, step=n, wait="sealed") for n in range(4))
        tickets = await asyncio.gather(*made)
        assert [ticket.step for ticket in sorted(tickets, key=lambda ticket: ticket.version)] == [0, 1, 2, 3]
        await tickets[3].wait_all(60.0)
    assert (await _read(tier.address(1), "turns", tickets[3].version)).tensors["w"].tolist() == [3] * 4


def test_a_ticket_of_a_closed_publisher_says_so(tier: Tier) -> None:
    with Publisher(tier.address(0), "closed", run="run-7") as publisher:
        ticket = publisher.publish({"w": torch.ones(2)}, step=5)
    assert repr(ticket) == f"Ticket(closed version {ticket.version}, step 5, run run-7)"
    with pytest.raises(Conflict, match="closed"):
        ticket.stage()
    with pytest.raises(Conflict, match="closed"):
        publisher.publish({"w": torch.ones(2)}, step=6)
    publisher.close()


def test_a_second_publisher_of_a_model_is_refused_until_the_first_closes(tier: Tier) -> None:
    tensors = {"w": torch.ones(2)}
    with Publisher(tier.address(0), "owned") as first, Publisher(tier.address(1), "owned") as second:
        before = first.publish(tensors, step=1, wait="sealed")
        with pytest.raises(Conflict, match=f"owned.*{first.run}"):
            second.publish(tensors, step=1)
        assert first.publish(tensors, step=2, wait="sealed").version > before.version
        first.close()
        assert when_free(second, tensors, 1).version > before.version


def test_a_version_larger_than_the_pool_is_refused_with_the_sizes(tier: Tier) -> None:
    with Publisher(tier.address(0), "large") as publisher:
        with pytest.raises(TooLarge, match=r"(?s)\d+.*pool.*\d+"):
            publisher.publish({"w": torch.zeros(65 << 20, dtype=torch.uint8)}, step=1)
        assert publisher.publish({"w": torch.zeros(8)}, step=1, wait="all").version >= 1


def test_what_cannot_be_published_is_refused_by_name_before_anything_moves(tier: Tier) -> None:
    with Publisher(tier.address(0), "refused") as publisher:
        with pytest.raises(InvalidRequest, match=r"'z'.*complex128"):
            publisher.publish({"w": torch.ones(2), "z": torch.zeros(2, dtype=torch.complex128)}, step=1)
        with pytest.raises(InvalidRequest, match="wait='later'"):
            publisher.publish({"w": torch.ones(2)}, step=1, wait="later")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=f"step is {1 << 70}"):
            publisher.publish({"w": torch.ones(2)}, step=1 << 70)
        with pytest.raises(InvalidRequest, match=r"'w\\udcff', which is not valid Unicode"):
            publisher.publish({"w\udcff": torch.ones(2)}, step=1)
    odd = "a model/with spaces"
    with Publisher(tier.address(0), odd) as publisher, pytest.raises(InvalidRequest, match=odd):
        publisher.publish({"w": torch.ones(2)}, step=1)

    async def versions() -> None:
        async with RelayClient(tier.address(0)) as relay:
            await relay.versions("refused")

    with pytest.raises(UnknownModel):
        asyncio.run(versions())


def test_another_architecture_under_the_same_name_is_refused_by_name_unless_it_is_allowed(tier: Tier) -> None:
    w, b = torch.ones(2, 3), torch.ones(3)
    with Publisher(tier.address(0), "grown", wait="all") as publisher:
        first = publisher.publish({"w": w, "b": b}, step=1)
        assert first.warnings == ()
        differs = (
            r"no next version of grown: it differs from version 1 of grown: 'b' is missing; 'w' has the shape \[3, 3\]"
        )
        with pytest.raises(Conflict, match=rf"{differs}, before \[2, 3\].*another model name.*allow_change=True"):
            publisher.publish({"w": torch.ones(3, 3)}, step=2)
        assert publisher.publish({"w": w, "b": b}, step=3).warnings == (), "nothing came of the refused one"
        halved = publisher.publish({"w": w.bfloat16(), "b": b}, step=4)
        assert halved.warnings == (
            "its dtypes differ from version 2 of grown, engines convert: 'w' is BF16, before F32",
        )
        allowed = publisher.publish({"w": torch.ones(3, 3)}, step=5, allow_change=True)
        assert "'b' is missing" in allowed.warnings[0]
    with Publisher(tier.address(1), "grown") as resumed, pytest.raises(Conflict, match="'b' is new"):
        resumed.publish({"w": torch.ones(3, 3), "b": b}, step=6)


def test_nan_is_not_published_unless_it_is_meant_to(tier: Tier) -> None:
    tensors = {"fine": torch.ones(1 << 20), "w": torch.full((4,), math.nan)}
    with Publisher(tier.address(0), "diverged", wait="all") as publisher:
        with pytest.raises(InvalidRequest, match="'w' holds NaN: this version is not published"):
            publisher.publish(tensors, step=1)
        meant = publisher.publish(tensors, step=2, check_nan=False)
    assert read(tier, meant).tensors["w"].isnan().all()


def test_a_ticket_and_its_publisher_tell_which_engines_refused_a_version_and_why(tier: Tier) -> None:
    async def report(version: int, engine: str, error: str) -> None:
        async with RelayClient(tier.address(1)) as beside:  # the relay beside an engine, not the master
            await beside.report_load("told", version, engine, error)

    with Publisher(tier.address(0), "told") as publisher:
        assert publisher.status().version is None
        ticket = publisher.publish({"w": torch.ones(2)}, step=1, wait="all")
        assert ticket.refused_loads() == ()
        for engine in ("e1", "e0", "e1"):
            asyncio.run(report(ticket.version, engine, f"version {ticket.version} computes NaN"))
        found = ticket.refused_loads()
        assert [(one.version, one.engine, one.error, one.times) for one in found] == [
            (1, "e0", "version 1 computes NaN", 1),
            (1, "e1", "version 1 computes NaN", 2),
        ]
        status = publisher.status()
        assert (status.version, status.stage, status.newest_sealed, status.run) == (1, "all", 1, publisher.run)
        assert status.refused_loads == found
        following = publisher.publish({"w": torch.ones(2)}, step=2, wait="all")
        assert following.warnings == ("version 1 of told was refused by 2 engines (e0, e1): version 1 computes NaN",)
        shaped = {"w": torch.ones(3)}
        asyncio.run(report(following.version, "e0", "'w' has shape [2], the model has [3]"))
        right = publisher.publish(shaped, step=3, wait="all")
        assert "was refused by 1 engines (e0)" in right.warnings[0], "nothing is compared with what engines refused"
        with pytest.raises(Conflict, match=r"differs from version 3 of told: 'w' has the shape \[2\], before \[3\]"):
            publisher.publish({"w": torch.ones(2)}, step=4)
        asyncio.run(report(ticket.version, "e0", ""))
        assert [one.engine for one in ticket.refused_loads()] == ["e1"]
        with pytest.raises(NotFound, match="version 99 of told"):
            asyncio.run(report(99, "e0", "no"))


def test_waiting_for_more_relays_than_there_are_ends_at_the_deadline(tier: Tier) -> None:
    with Publisher(tier.address(0), "patient") as publisher:
        with pytest.raises(InDoubt, match="is sealed, but had not reached 3 relays"):
            publisher.publish({"w": torch.ones(2)}, step=1, wait=3, timeout_s=5.0)  # time enough for the seal
        assert publisher.publish({"w": torch.ones(2)}, step=2, wait=2).stage() == "all"


@pytest.mark.parametrize("address", ["", "trainer-0", "http://trainer-0:7070", "trainer-0:relay"])
def test_what_is_no_address_is_told_the_form(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is no relay's HOST:PORT \(such as 127\.0\.0\.1:7000\)"):
        Publisher(address).publish({"w": torch.ones(2)}, step=1)


def test_a_relay_that_starts_after_the_trainer_is_waited_for(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status, tries = RelayClient.status, iter(range(2))

    async def late(relay: RelayClient) -> RelayStatus:
        if next(tries, None) is not None:
            raise Unavailable(f"no relay answers at {relay.address}")
        return await status(relay)

    monkeypatch.setattr(RelayClient, "status", late)
    with Publisher(tier.address(0), "early") as publisher:
        assert publisher.publish({"w": torch.ones(2)}, step=1).version == 1
    away, back = [record.message for record in caplog.records if record.name == "trainer_client.gateway_http"]
    assert away == f"no relay answers at {tier.address(0)}; trying again for 60 s"
    assert f"the relay at {tier.address(0)} answers now" in back


def test_a_wrong_port_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    with (
        Publisher(f"127.0.0.1:{port}", timeout_s=2.0) as publisher,
        pytest.raises(Unavailable, match=str(port)),
    ):
        publisher.publish({"w": torch.ones(2)}, step=1)


def test_a_port_that_is_not_a_relays_grpc_port_is_named(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    data_port = tier.relays[0].ready["data"]
    with Publisher(data_port, timeout_s=1.0) as publisher, pytest.raises(LaminarError, match=data_port):
        publisher.publish({"w": torch.ones(2)}, step=1)


def test_a_port_that_never_answers_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.gateway_http.PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Publisher(address, timeout_s=0.5) as publisher, pytest.raises(Unavailable, match=address):
            publisher.publish({"w": torch.ones(2)}, step=1)


def test_without_etcd_training_goes_on_and_nothing_is_called_published(tmp_path: Path) -> None:
    with running_tier(tmp_path, count=1) as tier, Publisher(tier.address(0)) as publisher:
        first = publisher.publish({"w": torch.ones(2)}, step=1, wait="all")
        tier.etcd.stop()
        second = publisher.publish({"w": torch.zeros(2)}, step=2)
        assert second.version == first.version + 1
        with pytest.raises(LaminarError):
            second.wait_sealed(timeout_s=1.0)
        assert second.stage() == "copied"
        assert read(tier, first, relay=0).tensors["w"].tolist() == [1.0, 1.0]
