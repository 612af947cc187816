"""Publishes a version by the SDK of the release that runs it: RELAY MODEL STEP [--tcp] [--weights FILE].

--tcp: over the data port, as from another host. --weights: those of a safetensors file, instead of arrays made of STEP.
Prints {"version", "digest"}; `read.py` prints the same digest for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json

import numpy as np

from trainer_client import Publisher

parser = argparse.ArgumentParser()
parser.add_argument("relay")
parser.add_argument("model")
parser.add_argument("step", type=int)
parser.add_argument("--tcp", action="store_true")
parser.add_argument("--weights", help="a safetensors file, published instead")
asked = parser.parse_args()

if asked.weights:
    from safetensors.torch import load_file

    tensors = dict(load_file(asked.weights))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
else:
    rng = np.random.default_rng(asked.step)
    tensors = arrays = {
        "model.embed.weight": rng.random((512, 4096), np.float32),
        "model.layers.0.w": rng.random((333, 1001)).astype(np.float16),
        "ids": rng.integers(0, 1 << 40, 17),
        "empty": np.zeros((0, 4), np.float32),
    }

found = hashlib.sha256()
for name, array in sorted(arrays.items()):
    found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
with Publisher(asked.relay, asked.model, force_tcp=asked.tcp, timeout_s=60.0) as publisher:
    ticket = publisher.publish(tensors, step=asked.step, wait="sealed")
    assert ticket.stage() != "lost"
    assert publisher.status().newest_sealed == ticket.version
print(json.dumps({"version": ticket.version, "digest": found.hexdigest()}))
