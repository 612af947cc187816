"""Calls of today's SDK that the release before does not know, at GATEWAY. Prints {call: its error}; "" for none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from protos.errors import LaminarError
from trainer_client import ExperienceReader, PromptPool


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except LaminarError as error:
        return str(error)
    return ""


with ExperienceReader(sys.argv[1]) as reader, PromptPool(sys.argv[1]) as pool:
    told = {
        "add": error_of(lambda: pool.add([{"prompt": "2 + 2?"}])),
        "rows": error_of(reader.rows),
        "strategy": error_of(lambda: reader.sample(trajectories=1, wait_s=0.0, strategy="newest")),
        "statistics": error_of(reader.statistics),
    }
print(json.dumps(told))
