"""One process trains a causal language model in plain torch and publishes its weights after every step.

paramserver serve --name a --port 7070 &
python -m trainer_client.examples.plain_torch --relay 127.0.0.1:7070 --model ./SmolLM2-135M-Instruct --steps 5

The loss is next-token prediction on random ids, so that it runs without data. For reinforcement learning sample from
the gateway in its place, with `trainer_client.ExperienceReader` (docs/quick-start.md has the whole loop).
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from trainer_client import Publisher

BATCH, LENGTH = 4, 32


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, vocab_size: int) -> float:
    """One step on a batch; returns the loss."""
    ids = torch.randint(vocab_size, (BATCH, LENGTH))
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relay", required=True, help="HOST:PORT of a relay, best one on this host")
    parser.add_argument("--model", required=True, help="model directory that the training begins with")
    parser.add_argument("--name", default="policy", help="name to publish under")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    with Publisher(args.relay, args.name) as publisher:
        ticket = None
        for step in range(1, args.steps + 1):
            loss = train_step(model, optimizer, model.config.vocab_size)
            # Returns as soon as the weights are copied: the next step may change them at once. Config and tokenizer
            # ride along, so that whoever gets the snapshot opens it with `from_pretrained`.
            ticket = publisher.publish(model.state_dict(), step=step, files=args.model)
            print(f"step {step}: loss {loss:.4f}, version {ticket.version}", flush=True)
        if ticket is not None:
            ticket.wait_sealed()  # before the process ends: what is copied is not yet published
            print(f"version {ticket.version} is sealed")


if __name__ == "__main__":
    main()
