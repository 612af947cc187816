"""A headless Chromium for tests, driven by its DevTools protocol over a websocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.side_package import installed
from tests.support.skips import needs

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--remote-debugging-port=0"),
)
START_S, END_S = 120.0, 20.0
CALL_S = 60.0
WAIT_S = 90.0
LOOK_S = 0.05
AXE_LOCK = Path(__file__).with_name("axe.lock")


def lacking() -> str:
    """Why there is no browser here; "" where there is one."""
    if executable() is None:
        return needs("there is no Chromium", "`make system-packages`, as root")
    return ""


def executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def axe_source() -> str:
    """The script of axe-core, which a page runs on itself."""
    [found] = installed(AXE_LOCK).rglob("axe.min.js")
    return found.read_text()


class PageFailed(AssertionError):
    """A script of the page raised, or a call to the browser failed."""


@dataclass(eq=False)
class Page:
    """One tab. `complaints`: errors of its scripts, and what its security policy blocked."""

    browser: Browser
    session: str
    complaints: list[str] = field(default_factory=list)

    async def call(self, method: str, **params: Any) -> Any:
        return await self.browser.call(method, self.session, **params)

    async def goto(self, url: str) -> None:
        answer = await self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise PageFailed(f"{url}: {answer['errorText']}")
        await self.until("document.readyState === 'complete'", "the page")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise; JSON types only."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageFailed(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    async def until(self, condition: str, what: str, timeout_s: float = WAIT_S) -> Any:
        """The condition's value, once it is true of the page; True for an object."""
        look = f"(() => {{ const found = {condition}; return found && typeof found === 'object' ? true : found; }})()"
        deadline = time.monotonic() + timeout_s
        while not (found := await self.evaluate(look)):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; {self.complaints}"
            await asyncio.sleep(LOOK_S)
        return found

    async def text(self, selector: str) -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """In its middle, with the mouse, as a person does."""
        at = await self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView("
            "{block: 'center', behavior: 'instant'}); const box = node.getBoundingClientRect(); "
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    async def key(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS.get(key, (ord(key.upper()) if len(key) == 1 else 0, key if len(key) == 1 else ""))
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int, *, scale: float = 1.0, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    async def scheme(self, name: str) -> None:
        """`light` or `dark`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def screenshot(self, *, whole: bool = False) -> bytes:
        """PNG; `whole`: beyond what is in view, too."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    async def violations(self) -> list[str]:
        """What axe finds wrong with the page, in words; each with the first elements that it is about."""
        if not await self.evaluate("typeof window.axe === 'object'"):
            await self.evaluate(f"{axe_source()}; true")
        found = await self.evaluate("axe.run({resultTypes: ['violations']}).then((found) => found.violations)")
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: "
            + "; ".join(f"{' '.join(node['target'])}: {node['failureSummary']}" for node in one["nodes"][:3])
            for one in found
        ]


KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    " ": (32, " "),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}
"""By name: the code of the key, and the text that it makes."""


class Browser:
    """Owner of the connection to Chromium; a call is answered under its number."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}

    async def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message if session is None else {**message, "sessionId": session})
        async with asyncio.timeout(CALL_S):
            answer = await self._waiting[number]
        if "error" in answer:
            raise PageFailed(f"{method}: {answer['error']}")
        return answer["result"]

    async def page(self) -> Page:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.size(1280, 900)
        return page

    async def read(self) -> None:
        """Until the browser ends."""
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                waiting = self._waiting.pop(found["id"])
                if not waiting.done():
                    waiting.set_result(found)
            elif (page := self._pages.get(found.get("sessionId", ""))) is not None:
                _take_complaint(page, found["method"], found["params"])
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PageFailed("the browser has ended"))


def _take_complaint(page: Page, method: str, params: dict[str, Any]) -> None:
    if method == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        page.complaints.append(details.get("exception", {}).get("description") or details["text"])
    elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
        entry = params["entry"]
        if entry["source"] != "network":  # a gateway that is away, or asks for a key, is part of what is tested
            page.complaints.append(f"{entry['text']} {entry.get('url', '')}")


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A Chromium with a profile of its own, which is removed with it."""
    profile = Path(tempfile.mkdtemp(prefix="laminar-browser-"))
    path = executable()
    assert path is not None, lacking()
    process = await asyncio.create_subprocess_exec(
        *(path, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    try:
        address = await _address(profile, process)
        async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
            found = Browser(socket)
            reading = asyncio.create_task(found.read(), name="browser")
            try:
                yield found
            finally:
                reading.cancel()
                await asyncio.wait([reading])
    finally:
        await _end(process)
        shutil.rmtree(profile, ignore_errors=True)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _address(profile: Path, process: asyncio.subprocess.Process) -> str:
    """Chromium writes its port and path into its profile once it listens."""
    deadline = time.monotonic() + START_S
    written = profile / "DevToolsActivePort"
    while True:
        if written.exists() and len(lines := written.read_text().split("\n")) >= 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        assert process.returncode is None, f"Chromium ended with {process.returncode}"
        assert time.monotonic() < deadline, f"Chromium does not listen after {START_S} s"
        await asyncio.sleep(LOOK_S)
