"""Three relay processes in a chain: what arrives at its end is, byte for byte, what safetensors itself writes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.numpy import save_file

from paramserver.client import RelayClient, TensorSource, publish
from protos.errors import Conflict, NotFound, OutOfCapacity, TooLarge, Unavailable, UnknownModel, UnsupportedField
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.weights import source_of, weights

pytestmark = pytest.mark.slow


def chain_of_three(relays: Relays, *flags: str) -> list[Daemon]:
    return [relays.start(name, *flags) for name in "abc"]


async def bytes_at(relay: RelayClient, model: str = "policy") -> dict[str, bytes]:
    lease = await relay.acquire(model, holder="test")
    found = {path.name: path.read_bytes() for path in lease.path.iterdir()}
    await relay.release(lease)
    return found


async def test_every_relay_holds_what_safetensors_writes(relays: Relays, tmp_path: Path) -> None:
    daemons = chain_of_three(relays)
    tensors = weights(0)
    save_file(tensors, tmp_path / "expected.safetensors", {"format": "pt"})
    expected = (tmp_path / "expected.safetensors").read_bytes()
    async with RelayClient(daemons[0].ready["grpc"]) as head:
        for force_tcp in (False, True):
            ticket = await publish(
                head, "policy", source_of(tensors), step=7, run="r", metadata={"format": "pt"}, force_tcp=force_tcp
            )
            await ticket.wait_all(60.0)
            assert await ticket.stage() == "all"
            assert await ticket.holders() == ("a", "b", "c")
            for daemon in daemons:
                async with RelayClient(daemon.ready["grpc"]) as relay:
                    assert (await relay.newest("policy")).version == ticket.version
                    assert await bytes_at(relay) == {"model.safetensors": expected}


async def test_torch_tensors_in_several_files_equal_save_file(relays: Relays, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from safetensors.torch import save_file as torch_save_file

    tensors = {f"layer.{i}.weight": torch.randn(257, 1031).to(torch.bfloat16) for i in range(5)}
    sources = [
        TensorSource(name, "BF16", tuple(t.shape), lambda t=t: memoryview(t.view(torch.uint8).numpy().reshape(-1)))
        for name, t in tensors.items()
    ]
    daemons = chain_of_three(relays)
    async with RelayClient(daemons[0].ready["grpc"]) as head, RelayClient(daemons[2].ready["grpc"]) as tail:
        ticket = await publish(head, "policy", sources, step=1, run="r", file_bytes_max=2 * 257 * 1031 * 2)
        await ticket.wait_all(60.0)
        lease = await tail.acquire("policy", holder="test")
        index = json.loads((lease.path / "model.safetensors.index.json").read_text())
        for name in sorted(set(index["weight_map"].values())):
            mine = {key: tensors[key] for key, file in index["weight_map"].items() if file == name}
            torch_save_file(mine, tmp_path / name)
            assert (lease.path / name).read_bytes() == (tmp_path / name).read_bytes()
            assert all(torch.equal(t, mine[key]) for key, t in load_file(lease.path / name).items())
        await tail.release(lease)


async def test_watch_acquire_and_retire(relays: Relays) -> None:
    daemons = chain_of_three(relays)
    events: list[tuple[str, int]] = []
    async with RelayClient(daemons[0].ready["grpc"]) as head, RelayClient(daemons[2].ready["grpc"]) as tail:

        async def follow() -> None:
            async for event in tail.watch("policy"):
                events.extend([(event.kind, event.version.step)])

        following = asyncio.create_task(follow())
        tickets = [await publish(head, "policy", source_of(weights(0)), step=10, run="r")]
        await tickets[0].wait_all(60.0)
        pin = await tail.acquire("policy", holder="engine-3", ttl_s=30.0)
        for step in (20, 30, 40):
            tickets.append(await publish(head, "policy", source_of(weights(step)), step=step, run="r"))
            await tickets[-1].wait_all(60.0)
        assert [ticket.version for ticket in tickets] == [1, 2, 3, 4]

        async def versions() -> list[int]:
            return [version.version for version in await tail.versions("policy")]

        async def retired(expected: list[int]) -> bool:
            return await versions() == expected

        await until(lambda: retired([1, 3, 4]), "version 2 retires, the pinned version 1 stays")
        status = await tail.status()
        assert [(p.version, p.holder) for p in status.pins] == [(1, "engine-3")]
        assert status.held == {"policy": (1, 3, 4)}
        await tail.renew(pin)
        await tail.release(pin)
        await until(lambda: retired([3, 4]), "the released version 1 retires")

        async def heard() -> bool:
            return ("retired", 10) in events

        await until(heard, "the watcher hears of it, too")
        with pytest.raises(NotFound, match="lapsed or was released"):
            await tail.release(pin)
        with pytest.raises(NotFound, match="held here: 3, 4"):
            await tail.acquire("policy", 1, holder="late")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert [step for kind, step in events if kind == "available"] == [10, 20, 30, 40]
    assert [step for kind, step in events if kind == "retired"] == [20, 10]
    assert events.index(("sealed", 20)) < events.index(("available", 20))


async def test_a_lapsed_pin_is_not_taken_for_a_held_one(relays: Relays) -> None:
    daemon = relays.start("a")
    async with RelayClient(daemon.ready["grpc"]) as relay:
        await (await publish(relay, "policy", source_of(weights(0)), step=1, run="r")).wait_sealed(60.0)
        lease = await relay.acquire("policy", holder="slow", ttl_s=0.1)

        async def lapsed() -> bool:
            return not (await relay.status()).pins

        await until(lapsed, "the pin lapses")
        for use in (relay.renew, relay.release):
            with pytest.raises(NotFound, match="acquire again"):
                await use(lease)


async def test_a_late_joiner_catches_up(relays: Relays) -> None:
    head = relays.start("a")
    async with RelayClient(head.ready["grpc"]) as relay:
        for step in (1, 2, 3):
            ticket = await publish(relay, "policy", source_of(weights(step)), step=step, run="r")
            await ticket.wait_sealed(60.0)
        late = relays.start("b")
        async with RelayClient(late.ready["grpc"]) as joined:

            async def caught_up() -> bool:
                return "b" in await ticket.holders()

            await until(caught_up, "the late joiner holds the newest version")
            assert [v.version for v in await joined.versions("policy")] == [3]
            assert await bytes_at(joined) == await bytes_at(relay)


async def test_bad_input_is_refused_by_name_and_leaves_no_trace(relays: Relays) -> None:
    daemon = relays.start("a", pool_bytes="16MiB")
    tensors = source_of(weights(0))
    async with RelayClient(daemon.ready["grpc"]) as first, RelayClient(daemon.ready["grpc"]) as second:
        with pytest.raises(UnknownModel, match="no model 'policy' here"):
            await first.versions("policy")
        await (await publish(first, "policy", tensors, step=1, run="one")).wait_sealed(60.0)
        with pytest.raises(Conflict, match=r"model policy has a publisher already: .* \(run one\)"):
            await publish(second, "policy", tensors, step=1, run="two")
        with pytest.raises(UnsupportedField, match="'w' has dtype 'F4'"):
            await publish(first, "policy", [TensorSource("w", "F4", (1,), lambda: memoryview(b""))], step=2, run="one")
        huge = TensorSource("w", "U8", (17 << 20,), lambda: memoryview(b""))
        with pytest.raises(TooLarge, match=r"takes 17 MiB, the pool has 16 MiB"):
            await publish(first, "policy", [huge], step=2, run="one")
        short = TensorSource("w", "U8", (100,), lambda: memoryview(b"short"))
        with pytest.raises(Exception, match="'w' gave 5 bytes, its shape and dtype make 100"):
            await publish(first, "policy", [short], step=2, run="one")
        for version in await first.versions("policy"):
            await first.acquire("policy", version.version, holder="engine-1")
        wide = TensorSource("w", "U8", (14 << 20,), lambda: memoryview(bytes(14 << 20)))
        with pytest.raises(OutOfCapacity, match=r"version 1 \(.* MiB\) pinned by engine-1"):
            await publish(first, "policy", [wide], step=2, run="one", wait_room_s=0.2)
        ticket = await publish(first, "policy", tensors, step=2, run="one")
        await ticket.wait_sealed(60.0)
        assert (await first.newest("policy")).version == ticket.version


async def test_a_run_ends_with_its_publisher_and_the_next_continues_the_numbers(relays: Relays) -> None:
    daemon = relays.start("a")
    async with RelayClient(daemon.ready["grpc"]) as relay:
        async with RelayClient(daemon.ready["grpc"]) as publisher:
            await (await publish(publisher, "policy", source_of(weights(0)), step=100, run="one")).wait_sealed(60.0)

        async def published() -> int:
            try:
                ticket = await publish(relay, "policy", source_of(weights(1)), step=90, run="two")
            except Conflict:
                return 0
            await ticket.wait_sealed(60.0)
            return ticket.version

        assert await until(published, "the second run may publish") == 2
        newest = await relay.newest("policy")
        assert (newest.version, newest.step, newest.run) == (2, 90, "two")


async def test_health_and_reflection_answer(relays: Relays) -> None:
    daemon = relays.start("a")
    async with grpc.aio.insecure_channel(daemon.ready["grpc"]) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="laminar.v1.Relay")
        )
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        services = [service.name async for answer in answers for service in answer.list_services_response.service]
    assert "laminar.v1.Relay" in services


async def test_metrics_show_age_versions_and_memory(relays: Relays) -> None:
    daemon = relays.start("a", "--metrics-port", "0")
    async with RelayClient(daemon.ready["grpc"]) as relay:
        await (await publish(relay, "policy", source_of(weights(0)), step=1, run="r")).wait_sealed(60.0)
        await relay.acquire("policy", holder="engine")
        text = await asyncio.to_thread(scrape, daemon.ready["metrics"])
        lines = [line.split() for line in text.splitlines() if line.startswith("laminar_relay_")]
        found = {name.split("{")[0]: float(value) for name, value in lines}
        assert found["laminar_relay_pins"] == 1
        assert found["laminar_relay_commits_in_doubt"] == found["laminar_relay_pool_quarantined_bytes"] == 0
        assert found["laminar_relay_newest_version"] == 1
        assert 0 <= found["laminar_relay_newest_version_age_seconds"] < 60
        assert found["laminar_relay_pool_bytes"] == 64 << 20
        assert found["laminar_relay_pool_used_bytes"] == (await relay.newest("policy")).size_bytes


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as reply:
        text: str = reply.read().decode()
        return text


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paramserver", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


async def test_the_command_line_shows_lists_and_pulls(relays: Relays, tmp_path: Path) -> None:
    daemons = chain_of_three(relays)
    tensors = weights(0)
    async with RelayClient(daemons[0].ready["grpc"]) as head:
        await (await publish(head, "policy", source_of(tensors), step=5, run="r")).wait_all(60.0)
    tail = daemons[2].ready["grpc"]
    status = json.loads(command("status", "--relay", tail, "--json").stdout)
    assert status["members"] == ["a", "b", "c"]
    assert status["models"][0]["chain"] == ["a", "b", "c"]
    listed = json.loads(command("versions", "--relay", tail, "--model", "policy", "--json").stdout)
    assert (listed["version"], listed["step"]) == (1, 5)
    pulled = command("pull", "--relay", tail, "--model", "policy", "--out", str(tmp_path / "out"))
    assert pulled.returncode == 0, pulled.stderr
    save_file(tensors, tmp_path / "expected.safetensors")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    again = command("pull", "--relay", tail, "--model", "policy", "--out", str(tmp_path / "out"))
    assert (again.returncode, "exists" in again.stderr) == (1, True)


def test_wrong_addresses_give_one_clear_line(etcd: str, tmp_path: Path) -> None:
    cases = [
        (["status", "--relay", "127.0.0.1:1"], 1, "no relay answers at 127.0.0.1:1"),
        (["status", "--relay", etcd], 1, "speaks gRPC but is not a relay"),
        (["status", "--relay", "nonsense"], 2, "not HOST:PORT"),
        (["serve", "--etcd", "127.0.0.1:1", "--pool-dir", str(tmp_path / "p")], 1, "no etcd answers at 127.0.0.1:1"),
        (
            ["serve", "--etcd", etcd, "--port", etcd.split(":")[1]],
            1,
            f"cannot listen on 127.0.0.1:{etcd.split(':')[1]}",
        ),
        (["serve", "--etcd", etcd, "--pool-bytes", "lots"], 2, "'lots' is not a size"),
    ]
    for arguments, status, words in cases:
        found = command(*arguments, *(["--log-level", "error"] if arguments[0] == "serve" else []))
        assert found.returncode == status, found.stderr
        assert words in found.stderr
        assert "Traceback" not in found.stderr


def test_unavailable_is_what_a_dead_address_raises() -> None:
    async def ask() -> None:
        async with RelayClient("127.0.0.1:1", timeout_s=1.0) as relay:
            await relay.status()

    with pytest.raises(Unavailable, match="check the address"):
        asyncio.run(ask())
