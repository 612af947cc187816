"""Versions published tensor by tensor: what arrives, what is refused, and that every iterator is drained."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paramserver.client import RelayClient
from protos.errors import Conflict, InvalidRequest, LaminarError, StaleEpoch, TooLarge, Unavailable
from tests.support.processes import Daemon
from tests.support.relays import Relays
from trainer_client import Publisher, TensorMeta, gathered, manifest_of

pytestmark = pytest.mark.slow


def net(seed: int = 1) -> dict[str, torch.Tensor]:
    """All dtypes that trainers use, in an order that is not that of the file, and tied weights."""
    torch.manual_seed(seed)
    tensors = {
        "z.embed": torch.rand(301, 257).to(torch.bfloat16),
        "m.big": torch.rand(1031, 1021),
        "b.half": torch.rand(333, 77).to(torch.float16),
        "a.transposed": torch.rand(64, 33).T,
        "q.fp8": torch.rand(129, 65).to(torch.float8_e4m3fn),
        "q.fp8e5": torch.rand(7).to(torch.float8_e5m2),
        "q.int8": torch.randint(-128, 127, (1000, 3), dtype=torch.int8),
        "ids": torch.arange(17),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    tensors["head"] = tensors["z.embed"]
    return tensors


async def _directory(address: str, model: str, version: int) -> dict[str, torch.Tensor]:
    async with RelayClient(address) as relay:
        lease = await relay.acquire(model, version, holder="test")
        found = {}
        for path in sorted(lease.path.glob("*.safetensors")):
            found |= {name: tensor.clone() for name, tensor in load_file(path).items()}
        await relay.release(lease)
        return found


def read(daemon: Daemon, version: int, model: str = "policy") -> dict[str, torch.Tensor]:
    return asyncio.run(_directory(daemon.ready["grpc"], model, version))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


class Counted:
    """An iterator that counts what was taken of it, and may do something at one of its tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._items = iter(tensors.items())
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        item = next(self._items)
        self.taken += 1
        return item


@pytest.mark.parametrize("force_tcp", [False, True], ids=["shared-memory", "tcp"])
def test_tensors_in_any_order_arrive_bit_for_bit_in_one_file_or_in_several(relays: Relays, force_tcp: bool) -> None:
    head, tail = relays.start("a"), relays.start("b")
    expected = {name: tensor for name, tensor in net().items() if name != "head"}
    with Publisher(head.ready["grpc"], force_tcp=force_tcp) as publisher:
        for step, file_bytes_max in ((1, 4 << 30), (2, 300_000)):
            tensors = net()
            ticket = publisher.publish_stream(
                manifest_of(tensors), lambda t=tensors: gathered(t), step=step, wait=2, file_bytes_max=file_bytes_max
            )
            for tensor in tensors.values():
                tensor.zero_()  # nothing is read any more
            for daemon in (head, tail):
                same(read(daemon, ticket.version), expected)
        assert publisher.status().version == 2
        plain = publisher.publish(net(), step=3, wait="sealed")
        assert plain.warnings == (), "the same architecture, tied weights included, in one publish and the other"
        with pytest.raises(Conflict, match=r"'head' was tied to 'z.embed' \(.*dtype=.*allow_change=True, once"):
            publisher.publish({name: tensor.clone() for name, tensor in net().items()}, step=4)
        cast = publisher.publish(net(), step=4, dtype=torch.float16, wait="sealed")
        assert read(head, cast.version)["m.big"].dtype == torch.float16


def test_names_are_mapped_in_manifest_and_iterator_alike(relays: Relays) -> None:
    daemon = relays.start("a")
    tensors = {"module.w": torch.ones(3), "module.rope.inv_freq": torch.ones(2), "module.b": torch.zeros(1)}
    with Publisher(daemon.ready["grpc"]) as publisher:
        names = [(r"inv_freq$", None), (r"^module\.", "model.")]
        ticket = publisher.publish_stream(manifest_of(tensors), tensors.items(), step=1, names=names, wait="sealed")
        assert read(daemon, ticket.version).keys() == {"model.w", "model.b"}
        tied = {"embed.weight": tensors["module.w"], "lm_head.weight": tensors["module.w"], "b": tensors["module.b"]}
        for pairs in (tied, lambda: gathered(tied)):
            options: Any = {"names": [("^embed", None)], "allow_change": True, "wait": "sealed"}
            ticket = publisher.publish_stream(manifest_of(tied), pairs, step=2, **options)
            same(read(daemon, ticket.version), {"lm_head.weight": torch.ones(3), "b": torch.zeros(1)})


def test_names_that_the_manifest_ties_have_to_come_with_the_same_bytes(relays: Relays) -> None:
    """A manifest of weights that are tied, and an iterator whose buffer holds each of them in turn."""
    daemon = relays.start("a")
    shared = torch.rand(5, 7)
    manifest = manifest_of({"embed": shared, "head": shared})

    def of_one_buffer(other: float) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.inference_mode():
            buffer = torch.empty(5, 7)
            yield "head", buffer.copy_(shared)
            yield "embed", buffer.add_(other)

    with Publisher(daemon.ready["grpc"]) as publisher:
        with pytest.raises(InvalidRequest, match=r"'embed' came with other bytes than 'head', to which the manifest"):
            publisher.publish_stream(manifest, lambda: of_one_buffer(1.0), step=1)
        ticket = publisher.publish_stream(manifest, lambda: of_one_buffer(0.0), step=1, wait="sealed")
        same(read(daemon, ticket.version), {"embed": shared})
        buffers = lambda: ((name, one.data) for name, one in of_one_buffer(1.0))  # noqa: E731
        ticket = publisher.publish_stream(manifest_of(buffers()), buffers, step=2, allow_change=True, wait="sealed")
        same(read(daemon, ticket.version), {"embed": shared + 1.0, "head": shared})


def test_what_is_refused_is_named_after_the_iterator_is_drained_and_the_next_publish_works(relays: Relays) -> None:
    daemon = relays.start("a", pool_bytes="16MiB")
    metas = [TensorMeta(name, torch.float32, (2, 3)) for name in "abcd"]
    fine = {name: torch.ones(2, 3) for name in "abcd"}
    cases: list[tuple[type[LaminarError], str, dict[str, torch.Tensor], list[TensorMeta]]] = [
        (InvalidRequest, r"'b' came as F32 \[3, 2\], announced as F32 \[2, 3\]", fine | {"b": torch.ones(3, 2)}, metas),
        (InvalidRequest, "'b' came as F64", fine | {"b": torch.ones(2, 3).double()}, metas),
        (InvalidRequest, "'e' is not in the manifest", {"e": torch.ones(1), **fine}, metas),
        (InvalidRequest, "did not come: 'd'", {name: fine[name] for name in "abc"}, metas),
        (InvalidRequest, "'a' holds NaN", fine | {"a": torch.full((2, 3), torch.nan)}, metas),
        (InvalidRequest, "'a' is announced twice", fine, [*metas, metas[0]]),
        (InvalidRequest, "without tensors", fine, []),
        (TooLarge, "pool", fine, [TensorMeta("a", "U8", (17 << 20,))]),
    ]
    with Publisher(daemon.ready["grpc"]) as publisher:
        for number, (kind, message, tensors, manifest) in enumerate(cases):
            items = Counted(tensors)
            with pytest.raises(kind, match=message):
                publisher.publish_stream(manifest, items, step=number)
            assert items.taken == len(tensors), message
        ticket = publisher.publish_stream(metas, fine.items(), step=99, wait="sealed")
        with pytest.raises(Conflict, match="'d' is missing"):
            publisher.publish_stream(metas[:3], lambda: iter(fine.items()), step=100)
    same(read(daemon, ticket.version), fine)


def test_an_iterator_that_raises_ends_its_version_and_its_error_goes_through(relays: Relays) -> None:
    daemon = relays.start("a")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise ZeroDivisionError("in the trainer")

    metas = [TensorMeta(name, "F32", (1,)) for name in "ab"]
    with Publisher(daemon.ready["grpc"]) as publisher:
        with pytest.raises(ZeroDivisionError, match="in the trainer"):
            publisher.publish_stream(metas, broken(), step=1)
        items = {"a": torch.ones(1), "b": torch.ones(1)}
        ticket = publisher.publish_stream(metas, items.items(), step=2, wait="sealed")
        assert "came to nothing: LaminarError: its publisher raised ZeroDivisionError" in ticket.warnings[0]


class Scene:
    """Two relays; the publisher speaks to the one that is not master."""

    def __init__(self, relays: Relays) -> None:
        first, self.other = relays.start("a"), relays.start("b")
        with Publisher(first.ready["grpc"], run="before") as publisher:
            publisher.publish(net(0), step=0, wait=2)
            names = {"a": first, "b": self.other}
            self.master = names.pop(publisher.status().master)
        (self.other,) = names.values()


def stopping_at(
    number: int, scene: Scene, what: signal.Signals, passes: list[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `net(7)`; in the first pass the master is ended before that one."""
    passes.append(0)
    for at, item in enumerate(gathered(net(7))):
        if at == number and len(passes) == 1:
            os.kill(scene.master.process.pid, what)
        passes[-1] += 1
        yield item


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_factory_begins_again_by_itself_when_the_master_dies(relays: Relays, what: signal.Signals) -> None:
    scene, passes, tensors = Scene(relays), [], net(7)
    with Publisher(scene.other.ready["grpc"], run="after") as publisher:
        ticket = publisher.publish_stream(
            manifest_of(tensors), lambda: stopping_at(4, scene, what, passes), step=1, wait="sealed"
        )
    if what is signal.SIGSTOP:
        scene.master.process.send_signal(signal.SIGCONT)
    assert len(passes) >= 2
    assert set(passes) == {10}, "an iterator that was begun is drained"
    same(read(scene.other, ticket.version), {name: tensor for name, tensor in tensors.items() if name != "head"})


def test_an_iterator_is_drained_when_the_master_dies_and_the_error_says_what_would_be_right(relays: Relays) -> None:
    scene, passes, tensors = Scene(relays), [], net(7)
    items = stopping_at(4, scene, signal.SIGKILL, passes)
    with Publisher(scene.other.ready["grpc"], run="after") as publisher:
        with pytest.raises((Unavailable, StaleEpoch)):
            publisher.publish_stream(manifest_of(tensors), items, step=1)
        assert passes == [10]
        ticket = publisher.publish_stream(manifest_of(tensors), lambda: gathered(tensors), step=2, wait="sealed")
    same(read(scene.other, ticket.version), {name: tensor for name, tensor in tensors.items() if name != "head"})


def held_by(array: np.ndarray[Any, Any]) -> int:
    return sys.getrefcount(array)


def test_a_failed_stream_keeps_neither_tensors_nor_the_relays_memory(relays: Relays) -> None:
    daemon = relays.start("a")
    tensors = {"a": np.ones(1 << 20, np.uint8), "b": np.ones(8, np.float32)}
    metas = [TensorMeta("a", "U8", (1 << 20,)), TensorMeta("b", "F32", (8,))]
    before = held_by(tensors["a"])
    gc.disable()
    try:
        with Publisher(daemon.ready["grpc"]) as publisher:
            with pytest.raises(InvalidRequest, match="announced as"):
                publisher.publish_stream(metas, iter([("a", tensors["a"]), ("b", np.ones(9, np.float32))]), step=1)
            held = sum(1 for thread in threading.enumerate() if thread.name.startswith("publish-"))
            assert held == 0
            after = held_by(tensors["a"])  # on a line of its own: an assertion keeps what it looks at
            assert after == before
    finally:
        gc.enable()


MEMORY = """
import resource, sys, numpy as np
from trainer_client import Publisher, TensorMeta
address, num, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
metas = [TensorMeta(f"layers.{n:02}.w", "U8", (size,)) for n in range(num)]
def private():
    # Mapped memory of the relay's counts as shared: it is the pool's, not the trainer's.
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) << 10
peak = 0
def tensors():
    global peak
    for n in range(num):
        tensor = np.full(size, n, np.uint8)
        peak = max(peak, private())
        yield f"layers.{n:02}.w", tensor
        peak = max(peak, private())
        del tensor
with Publisher(address, force_tcp=sys.argv[4] == "tcp") as publisher:
    before = private()
    ticket = publisher.publish_stream(metas, tensors, step=1, wait="sealed")
    print(peak - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize(("way", "num"), [("shared-memory", 32), ("tcp", 8)])
def test_two_gib_of_weights_take_one_tensor_and_the_buffers(relays: Relays, way: str, num: int) -> None:
    size = 64 << 20
    daemon = relays.start("a", pool_bytes=f"{num * size + (64 << 20)}")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, daemon.ready["grpc"], str(num), str(size), way],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    extra = int(done.stdout.split()[0])
    assert size <= extra < size + (48 << 20), f"{extra >> 20} MiB for tensors of {size >> 20} MiB"


def test_a_state_dict_is_taken_and_an_iterator_that_raises_notes_how_far_it_came(relays: Relays) -> None:
    daemon = relays.start("a")
    tensors = {"a": torch.ones(4, 3), "b": torch.ones(3)}

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", tensors["a"]
        raise ValueError("out of memory")

    with Publisher(daemon.ready["grpc"]) as publisher:
        with pytest.raises(ValueError, match="out of memory") as caught:
            publisher.publish_stream(manifest_of(tensors), failing, step=1)
        assert caught.value.__notes__ == ["1 of 2 tensors had come, the last 'a'; the version is given up"]
        for wrong, message in (
            (None, "the tensors are of type NoneType"),
            (lambda: None, "the tensors are of type NoneType"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                publisher.publish_stream(manifest_of(tensors), cast(Any, wrong), step=1)
        with pytest.raises(InvalidRequest, match="writers='each'"):
            publisher.publish_stream(manifest_of(tensors), tensors, step=1, writers=cast(Any, "each"))
        ticket = publisher.publish_stream(manifest_of(tensors), tensors, step=1, wait="sealed")
    same(read(daemon, ticket.version), tensors)
