"""Several ranks train one model under FSDP2 and publish it together; no rank ever holds the whole.

paramserver serve --name a --port 7070 &
torchrun --standalone --nproc-per-node 2 -m trainer_client.examples.fsdp2 --relay 127.0.0.1:7070 --model ./SmolLM2-135M

Runs over gloo on CPUs, and over NCCL where every rank has a GPU. The loss is next-token prediction on random ids, so
that it runs without data.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from trainer_client import Publisher, TorchRanks, gathered, manifest_of

BATCH, LENGTH = 4, 32


def sharded(path: str, device: torch.device) -> torch.nn.Module:
    """The model with every layer, then the rest, sharded over all ranks."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path)
    model.to(device)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    return model


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, vocab_size: int, device: torch.device
) -> float:
    """One step on this rank's batch; returns its loss."""
    ids = torch.randint(vocab_size, (BATCH, LENGTH), device=device)
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relay", required=True, help="HOST:PORT of a relay, best one on rank 0's host")
    parser.add_argument("--model", required=True, help="model directory that the training begins with")
    parser.add_argument("--name", default="policy", help="name to publish under")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    torch.manual_seed(dist.get_rank())

    model = sharded(args.model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ranks = TorchRanks()

    with Publisher(args.relay, args.name) as publisher:
        for step in range(1, args.steps + 1):
            loss = train_step(model, optimizer, model.config.vocab_size, device)  # type: ignore[union-attr,arg-type]
            weights = model.state_dict()  # DTensors: each rank has its shards
            # Every rank calls this; it gathers one tensor after the other, and rank 0 writes it. All get the same
            # version, or the same error. Given a function, the publish begins again by itself when a relay dies.
            ticket = publisher.publish_stream(
                manifest_of(weights), partial(gathered, weights), step=step, ranks=ranks, files=args.model
            )
            if ranks.index == 0:
                print(f"step {step}: loss {loss:.4f}, version {ticket.version}", flush=True)
        if args.steps and ranks.index == 0:
            ticket.wait_sealed()  # before the process ends: what is copied is not yet published
            print(f"version {ticket.version} is sealed")
        dist.barrier()  # rank 0's relay connection stays until its version is sealed, and the others with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
