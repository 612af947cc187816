"""Directories that are published as they are, and what rides along with a trainer's tensors."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from paramserver.client import RelayClient
from protos.errors import InvalidRequest
from tests.support.processes import Daemon
from tests.support.relays import Relays
from tests.support.tiny_model import tiny_model
from trainer_client import AsyncPublisher, Publisher, TensorMeta, manifest_of

pytestmark = pytest.mark.slow


def paramserver(*arguments: str, rc: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paramserver", *arguments], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == rc, done.stderr
    return done.stderr + done.stdout


async def _lease(address: str, version: int, copy_to: Path) -> None:
    async with RelayClient(address) as relay:
        lease = await relay.acquire("policy", version, holder="test")
        shutil.copytree(lease.path, copy_to)
        await relay.release(lease)


def snapshot(daemon: Daemon, version: int, directory: Path) -> Path:
    """A copy of the directory that an engine gets."""
    copy = directory / f"v{version}-{daemon.name}"
    asyncio.run(_lease(daemon.ready["grpc"], version, copy))
    return copy


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_pushed_directory_opens_with_from_pretrained_on_every_relay_and_comes_back(
    relays: Relays, tmp_path: Path
) -> None:
    head, tail = relays.start("a"), relays.start("b")
    model = tiny_model()
    said = paramserver("push", str(model), "--relay", head.ready["grpc"], "--model", "policy", "--copies", "2")
    assert "policy version 1 (step 0, run push-" in said
    assert "config.json" in said
    logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[1, 2, 3]])).logits
    for daemon in (head, tail):
        copy = snapshot(daemon, 1, tmp_path)
        equal(weights(copy), weights(model))
        assert torch.equal(AutoModelForCausalLM.from_pretrained(copy)(torch.tensor([[1, 2, 3]])).logits, logits)
        assert AutoTokenizer.from_pretrained(copy).encode("hello") == AutoTokenizer.from_pretrained(model).encode(
            "hello"
        )
    out = tmp_path / "pulled"
    paramserver("pull", "--relay", tail.ready["grpc"], "--model", "policy", "--out", str(out))
    equal(weights(out), weights(model))
    assert (out / "config.json").read_bytes() == (model / "config.json").read_bytes()
    with Publisher(head.ready["grpc"]) as publisher:
        publisher.publish(weights(model), step=1)
        said = paramserver("push", str(model), "--relay", head.ready["grpc"], "--model", "policy", rc=1)
        assert "has a publisher already" in said
        assert publisher.run in said


def test_push_refuses_by_name_and_its_help_teaches(relays: Relays, tmp_path: Path) -> None:
    daemon = relays.start("a")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    said = paramserver("push", str(tmp_path), "--relay", daemon.ready["grpc"], "--model", "policy", rc=1)
    assert "holds no *.safetensors file with weights, only pytorch_model.bin" in said
    shown = " ".join(paramserver("push", "--help").split())
    for words in ("paramserver push ./", "from_pretrained", "--copies", "Refused while another publisher"):
        assert words in shown


@pytest.mark.parametrize("force_tcp", [False, True], ids=["shared-memory", "tcp"])
def test_frozen_tensors_and_plain_files_ride_along(relays: Relays, tmp_path: Path, force_tcp: bool) -> None:
    daemon = relays.start("a")
    base = tmp_path / "base"
    base.mkdir()
    frozen = {"vision.w": torch.rand(77, 3), "lm_head.weight": torch.rand(4, 4), "trained.w": torch.zeros(5, 5)}
    save_file(frozen, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    trained = {"trained.w": torch.rand(5, 5).to(torch.float16), "embed": torch.rand(4, 4)}
    expected = {**trained, "vision.w": frozen["vision.w"]}
    files: dict[str, Any] = {"config.json": base / "config.json", "generation_config.json": "{}", "empty.txt": b""}
    with Publisher(daemon.ready["grpc"], force_tcp=force_tcp, wait="sealed") as publisher:
        streamed = publisher.publish_stream(
            manifest_of(trained), lambda: iter(trained.items()), step=1, base=base, files=files
        )
        whole = publisher.publish(
            {f"module.{name}": tensor for name, tensor in trained.items()},
            step=2,
            base=base,
            files=files,
            names=[("^module.", "")],
            file_bytes_max=100,
        )
        for ticket in (streamed, whole):
            copy = snapshot(daemon, ticket.version, tmp_path)
            equal(weights(copy), expected)
            assert (copy / "config.json").read_bytes() == (base / "config.json").read_bytes()
            assert (copy / "generation_config.json").read_text() == "{}"
            assert (copy / "empty.txt").read_bytes() == b""
        for name, message in (
            ("x.safetensors", "would stand beside the weights"),
            ("../config.json", "cannot name a file"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                publisher.publish(trained, step=3, files={name: b"1"})
        with pytest.raises(InvalidRequest, match="'file:a' cannot name a tensor"):
            publisher.publish_stream([TensorMeta("file:a", "U8", (1,))], iter(()), step=3)


async def test_a_rank_among_several_brings_the_plain_files(relays: Relays, tmp_path: Path) -> None:
    daemon = relays.start("a")
    ranks = [AsyncPublisher(daemon.ready["grpc"], run="job", rank=n, num_ranks=2) for n in range(2)]
    tickets = await asyncio.gather(
        ranks[0].publish({"a": torch.ones(3)}, step=1, wait="sealed", files={"config.json": "{}"}),
        ranks[1].publish({"b": torch.ones(4), "c": torch.ones(2)}, step=1, wait="sealed", file_bytes_max=8),
    )
    copy = await asyncio.to_thread(snapshot, daemon, tickets[0].version, tmp_path)
    equal(weights(copy), {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(2)})
    assert (copy / "config.json").read_text() == "{}"
    assert set(json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]) == {"a", "b", "c"}
    for rank in ranks:
        await rank.close()
