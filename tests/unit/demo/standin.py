"""A tiny process in the place of a daemon: `python standin.py ROLE ... --ready-file F`. Standard library only.

It announces itself, ends on SIGTERM, and tells made-up things.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEP_S = 0.15
ENGINES = ("engine-1", "engine-2", "engine-3")


def announce(**addresses: str) -> None:
    path = sys.argv[sys.argv.index("--ready-file") + 1]
    with open(path + ".scratch", "w") as scratch:
        json.dump(addresses, scratch)
    os.replace(path + ".scratch", path)


def trainer(does: str, steps: int, out: str) -> None:
    """Takes its steps, or fails, or stalls before the first."""
    announce()
    if does == "fail":
        sys.exit("the stand-in trainer fails as it was told to")
    while does == "stall":
        signal.pause()
    with open(out, "a", buffering=1) as events:
        for step in range(1, steps + 1):
            time.sleep(STEP_S)  # the pace of the made-up training
            done: dict[str, Any] = {"t": time.time(), "event": "step", "step": step, "version": step + 1}
            done |= {"reward_mean": 0.5, "loss": 0.1, "staleness_mean": 0.5, "staleness_max": 1}
            done |= {"tokens": 100, "seconds": STEP_S, "wait_s": 0.0}
            events.write(json.dumps(done) + "\n")
        time.sleep(6 * STEP_S)  # the last broadcast


class Gateway(BaseHTTPRequestHandler):
    """Says that every engine is busy, and has one event to tell. With `cuts`, each look finds one turn more cut."""

    cuts = False
    looks = 0

    def do_GET(self) -> None:
        engines = [{"name": name, "version": 1, "state": "serving", "running": 4} for name in ENGINES]
        Gateway.looks += 1
        counters = {"turns_lost": 0, "turns_cut": Gateway.looks if self.cuts else 0, "tokens_generated": 7}
        answer: dict[str, Any] = {"newest_version": 1, "engines": engines, "counters": counters}
        if self.path.startswith("/admin/timeline"):
            event = {"seq": 1, "t_unix_s": time.time(), "kind": "engine", "engine": "engine-1", "state": "serving"}
            answer = {"next": 1, "events": [event] if "after=0" in self.path else []}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(role: str, *arguments: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if role == "trainer":
        trainer(arguments[0], int(arguments[1]), arguments[2])
        return
    if role == "gateway":
        Gateway.cuts = arguments[:1] == ("cuts",)
        server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        announce(url=f"http://127.0.0.1:{server.server_port}")
    else:
        announce(**json.loads(arguments[0]))
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
