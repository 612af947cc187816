"""The pictures of docs/dashboard.md: `make screenshots`.

By default the page and its feed are the gateway's own, over a made-up fleet (`tests.ui.picture`): 5,000 agents on 80
engines would need a cluster. With `--real` gateway, three relays and etcd are processes, and only the engines
(`tests.ui.engines`) and agents (`tests.ui.agents`) are made up: that needs a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import processes
from tests.support.browser import Page, browser, lacking
from tests.support.processes import Daemon
from tests.support.tiny_model import tiny_model

DOCS = Path(__file__).parents[2] / "docs"
RELAYS = ("trainer-0", "engines-0", "engines-1")
POOL = "160MiB"
END_S = 5.0
BEGIN_S = 600.0
"""For all sessions to have begun."""
WIDE, PHONE = (1440, 960), (390, 844)


def end(daemon: Daemon) -> None:
    """Also of one that waits for what is gone already."""
    daemon.process.terminate()
    try:
        daemon.process.wait(END_S)
    except subprocess.TimeoutExpired:
        daemon.kill()


@contextlib.contextmanager
def fleet(sessions: int, engines: int) -> Iterator[str]:
    """The gateway's address. All of it is ended at the end, in whatever state it is."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laminar-screenshots-")))
        pools = Path(tempfile.mkdtemp(prefix="laminar-screenshots-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, pools, ignore_errors=True)

        def start(name: str, *command: str) -> Daemon:
            daemon = processes.start(name, list(command), directory)
            stack.callback(end, daemon)
            return daemon

        etcd = start("etcd", "paramserver", "etcd").ready["etcd"]
        relay = ("paramserver", "serve", f"--etcd={etcd}", "--port=0", f"--pool-bytes={POOL}")
        relays = [start(name, *relay, f"--name={name}", f"--pool-dir={pools / name}").ready["grpc"] for name in RELAYS]
        model = str(tiny_model())
        mocks = start("engines", "tests.ui.engines", f"--engines={engines}", f"--tokenizer={model}").ready
        named = {name: url for name, url in mocks.items() if name.startswith("e")}
        beside = [f"--engine={n}=vllm={url}@{relays[1 + at % 2]}" for at, (n, url) in enumerate(named.items())]
        options = [f"--tokenizer={model}", f"--data={directory / 'data'}", "--port=0", "--no-probe"]
        options += ["--tokens-per-event=8", "--intake-batch=256", "--queue-max=8192", "--queue-timeout-s=600"]
        options += ["--version-hold-s=20", "--max-running=64", "--prefill-tokens-per-s=100"]
        url = start("gateway", "gateway", "serve", "--model=policy", *options, *beside).ready["url"]
        command = [sys.executable, "-m", "tests.ui.agents", f"--url={url}", f"--relay={relays[0]}"]
        agents = subprocess.Popen([*command, f"--sessions={sessions}"])
        stack.callback(agents.wait)
        stack.callback(agents.kill)
        yield url


@contextlib.contextmanager
def made_up(sessions: int, engines: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="laminar-screenshots-") as directory:
        command = ["tests.ui.picture", f"--sessions={sessions}", f"--engines={engines}"]
        daemon = processes.start("picture", command, Path(directory))
        try:
            yield daemon.ready["url"]
        finally:
            daemon.kill()


async def shoot(page: Page, name: str, out: Path, *, whole: bool = False) -> None:
    picture = await page.screenshot(whole=whole)
    await asyncio.to_thread((out / f"dashboard-{name}.png").write_bytes, picture)
    print(f"dashboard-{name}.png: {len(picture) >> 10} KiB")


async def open_session(page: Page) -> None:
    """The transcript of the session that is chosen in the timeline."""
    await page.evaluate("document.querySelector('#timeline').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Enter"):
        await page.key(key)
    await page.until("document.querySelector('.token')", "its transcript")


async def take_all(url: str, out: Path, sessions: int, settle_s: float) -> None:
    async with browser() as chromium:
        page = await chromium.page()
        await page.size(*WIDE)
        await page.scheme("light")
        await page.goto(f"{url}/ui")
        live = "Number(document.querySelectorAll('.tile .figure')[1]?.textContent.replaceAll(',', ''))"
        await page.until(f"{live} >= {sessions * 0.97}", "all sessions", BEGIN_S)
        await asyncio.sleep(settle_s)
        await shoot(page, "light", out)
        await page.scheme("dark")
        await asyncio.sleep(2)
        await shoot(page, "dark", out)
        for _ in range(2):
            await page.click("#rows-more")
        await page.evaluate("document.querySelector('#timeline-heading').scrollIntoView({behavior: 'instant'})")
        await asyncio.sleep(2)
        await shoot(page, "rows", out)
        await page.scheme("light")
        await open_session(page)
        await asyncio.sleep(2)
        await page.evaluate("document.querySelector('#session-heading').scrollIntoView({behavior: 'instant'})")
        await asyncio.sleep(1)
        await shoot(page, "session", out)
        await page.click("#view-fit")
        await page.evaluate("document.querySelector('#fleet-heading').scrollIntoView({behavior: 'instant'})")
        await asyncio.sleep(2)
        await shoot(page, "panels", out)
        await page.size(*PHONE, scale=2.0, mobile=True)
        await page.evaluate("scrollTo(0, 0)")
        await asyncio.sleep(3)
        await shoot(page, "phone", out)
        await page.scheme("dark")
        await page.evaluate("document.querySelector('#timeline-heading').scrollIntoView({behavior: 'instant'})")
        await asyncio.sleep(2)
        await shoot(page, "phone-dark", out)
        assert page.complaints == [], page.complaints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--engines", type=int, default=80)
    parser.add_argument("--settle-s", type=float, default=122.0, help="before the first picture: the timeline fills")
    parser.add_argument("--real", action="store_true", help="a real gateway with real relays")
    parser.add_argument("--out", type=Path, default=DOCS)
    given = parser.parse_args()
    if reason := lacking():
        sys.exit(reason)
    with (fleet if given.real else made_up)(given.sessions, given.engines) as url:
        asyncio.run(take_all(url, given.out, given.sessions, given.settle_s))


if __name__ == "__main__":
    main()
