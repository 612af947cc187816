"""What only today's SDK publishes, at RELAY: MODEL STEP stream|files. Prints {"version"}, or {"error"}."""

from __future__ import annotations

import json
import sys

import numpy as np

from protos.errors import LaminarError
from trainer_client import Publisher, TensorMeta

relay, model, step, what = sys.argv[1:]
tensors = {"a": np.full((300, 700), float(step), np.float32), "b": np.arange(1000, dtype=np.float32)}
with Publisher(relay, model, timeout_s=60.0) as publisher:
    try:
        if what == "stream":
            manifest = [TensorMeta(name, "float32", array.shape) for name, array in tensors.items()]
            ticket = publisher.publish_stream(manifest, iter(tensors.items()), step=int(step), wait="sealed")
        else:
            files = {"config.json": b"{}"}
            ticket = publisher.publish(tensors, step=int(step), files=files, note="a note", wait="sealed")
    except LaminarError as error:
        print(json.dumps({"error": error.code, "message": str(error)}))
    else:
        print(json.dumps({"version": ticket.version}))
