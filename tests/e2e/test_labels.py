"""Labels of versions: given by every form of publish, and read back from the SDK and the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from paramserver.client import RelayClient, publish
from protos.errors import InvalidRequest
from tests.e2e.test_push import paramserver
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.weights import source_of
from trainer_client import Publisher, SealedVersion, TorchRanks, manifest_of

pytestmark = pytest.mark.slow

W = {"w": torch.ones(8)}


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchRanks]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield TorchRanks()
    dist.destroy_process_group()


async def _publish(address: str, note: str) -> None:
    async with RelayClient(address) as relay:
        ticket = await publish(relay, "policy", source_of({"w": np.ones(8, np.float32)}), step=0, run="r", note=note)
        await ticket.wait_sealed(60.0)


async def _newest(address: str, model: str, version: int) -> SealedVersion:
    async with RelayClient(address) as relay:

        async def there() -> SealedVersion | None:
            newest = await relay.newest(model)
            return newest if newest is not None and newest.version == version else None

        return await until(there, f"version {version} is there")


def note_of(daemon: Daemon, version: int, model: str = "policy") -> str:
    return asyncio.run(_newest(daemon.ready["grpc"], model, version)).labels["note"]


def test_every_form_of_publish_takes_a_note_and_every_relay_returns_it(
    relays: Relays, one_rank: TorchRanks, tmp_path: Path
) -> None:
    head, tail = relays.start("a"), relays.start("b")
    with Publisher(head.ready["grpc"], wait="sealed") as publisher:
        publisher.publish(W, step=1, note="whole")
        assert [one.labels["note"] for one in publisher.status().sealed] == ["whole"]
        publisher.publish_async(W, step=2, stable=True, note="behind").result()
        assert note_of(tail, 2) == "behind"
        publisher.publish_stream(manifest_of(W), W, step=3, note="stream")
        assert note_of(tail, 3) == "stream"
        publisher.publish_shards(W, step=4, ranks=one_rank, note="shards")
        assert note_of(tail, 4) == "shards"
        publisher.publish(W, step=5)
        assert note_of(tail, 5) == "", "a label is of one version"
        with pytest.raises(InvalidRequest, match=r"note has 257 characters \(expected `str` of length <= 256\)"):
            publisher.publish(W, step=6, note="x" * 257)
        publisher.publish(W, step=6, note="x" * 256, wait=2)
    asyncio.run(_publish(head.ready["grpc"], "from the client"))
    assert note_of(tail, 7) == "from the client"
    save_file(W, tmp_path / "model.safetensors")
    pushed = ("push", str(tmp_path), "--relay", head.ready["grpc"], "--model", "pushed")
    paramserver(*pushed, "--copies", "2", "--note", "the base [model]")
    assert note_of(tail, 1, "pushed") == "the base [model]"
    where = ("--relay", tail.ready["grpc"])
    assert "the base [model]" in paramserver("versions", *where, "--model", "pushed")
    assert json.loads(paramserver("versions", *where, "--model", "pushed", "--json"))["labels"]["note"] == (
        "the base [model]"
    )
    assert "version 1 note: the base [model]" in paramserver("status", *where)
    assert "note has 257 characters (expected" in paramserver(*pushed, "--note", "x" * 257, rc=1)
