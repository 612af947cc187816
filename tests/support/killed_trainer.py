"""A trainer that keeps checkpoints and kills itself at a given point: `python -m tests.support.killed_trainer`.

A step "trains" by adding its batch's sessions to what a checkpoint keeps in place of weights. Each `every` steps it
writes a checkpoint. Batches are acknowledged once a checkpoint has them, or, with `--early`, after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

from trainer_client import Batch, ExperienceReader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gateway")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--uses", type=int, default=1)
    parser.add_argument("--die", default="", help="POINT:STEP; the points are sampled, saved and acked")
    options = parser.parse_args()
    with ExperienceReader(options.gateway, reader="killed") as reader:
        train(reader, options)


def train(reader: ExperienceReader, options: argparse.Namespace) -> None:
    kept: dict[str, Any] = {"step": 0, "trained": []}
    if options.checkpoint.exists():
        kept = json.loads(options.checkpoint.read_text())
        print("given back:", reader.resume(kept["reader"]), flush=True)

    def reach(point: str) -> None:
        if f"{point}:{kept['step']}" == options.die:
            os.kill(os.getpid(), signal.SIGKILL)

    used: list[Batch] = []
    while batch := reader.sample(trajectories=2, wait_s=0, uses_max=options.uses):
        kept["step"] += 1
        reach("sampled")
        kept["trained"] += [head.session_id for head in batch.heads]
        used.append(batch)
        if kept["step"] % options.every == 0:
            save(options.checkpoint, {**kept, "reader": reader.state_dict(*([] if options.early else used))})
            reach("saved")
        if options.early or kept["step"] % options.every == 0:
            for one in used:
                reader.ack(one)
            used.clear()
            reach("acked")
    save(options.checkpoint, {**kept, "reader": reader.state_dict()})
    for one in used:
        reader.ack(one)


def save(path: Path, content: dict[str, Any]) -> None:
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
