"""Reads experience by the SDK of the release that runs it: GATEWAY COUNT ack|give_back|keep.

Prints {"lease", "sessions": {id: {"token_ids", "logprobs", "versions", "reward"}}}; `keep` leaves the lease open.
"""

from __future__ import annotations

import json
import sys

from trainer_client import ExperienceReader

url, count, then = sys.argv[1:]
with ExperienceReader(url) as reader:
    batch = reader.sample(trajectories=int(count), wait_s=60.0)
    packed = batch.pack()
    sessions = {}
    for index, one in enumerate(batch.trajectories):
        row = slice(int(packed.cu_seqlens[index]), int(packed.cu_seqlens[index + 1]))
        assert packed.input_ids[row].tolist() == list(one.token_ids)
        assert packed.versions[row].tolist() == list(one.versions)
        sessions[one.session_id] = {
            "token_ids": list(one.token_ids),
            "logprobs": list(one.logprobs),
            "versions": list(one.versions),
            "reward": one.reward,
        }
    if then != "keep":
        getattr(reader, then)(batch)
print(json.dumps({"lease": batch.lease_id, "sessions": sessions}))
