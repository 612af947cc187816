"""Records the status and events of the running processes, read through their public interfaces.

Invariants:
- a process that does not answer never fails the run: the recording gets one note, and requests are repeated;
- every event of the gateway's timeline is read exactly once, in order, the last ones by `Watchers.last_look`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from deploy.demo.processes import DemoError
from deploy.demo.recording import GatewayStatus, Note, Observation, Recording, RelaySeen, timeline_event, trainer_event
from paramserver.client import RelayClient
from protos.errors import LaminarError

STATUS_INTERVAL_S = 0.5
TRANSFER_INTERVAL_S = 0.1  # a version of 269 MB crosses a hop in about so long
TIMELINE_PAGE = 1000
TIMEOUT_S = 10.0


class Watchers:
    """The owner of the background tasks that record, each from the call that begins it until `last_look`."""

    def __init__(self, recording: Recording, model: str) -> None:
        self._recording = recording
        self._model = model
        self._stack = AsyncExitStack()
        self._gateway: GatewayWatcher | None = None
        self._trainer: TrainerEvents | None = None
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end_tasks()
        await self._stack.aclose()

    async def relays(self, addresses: Mapping[str, str]) -> None:
        for name, address in addresses.items():
            client = await self._stack.enter_async_context(RelayClient(address))
            self._begin(watch_versions(name, client, self._model, self._recording))
            self._begin(watch_transfers(name, client, self._model, self._recording))

    async def gateway(self, url: str) -> None:
        session = await self._stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S))
        self._gateway = GatewayWatcher(url, self._recording, session)
        self._begin(self._gateway.watch())

    def trainer(self, events: Path) -> None:
        self._trainer = TrainerEvents(events)
        self._begin(watch_trainer(self._trainer, self._recording))

    async def look(self, what: str = "a look") -> None:
        """Reads the gateway's status now, for a caller that acts on it."""
        assert self._gateway is not None
        try:
            await self._gateway.look()
        except (httpx.HTTPError, DemoError) as error:
            self._recording.add(_warning(f"the gateway did not answer {what}: {error!r}"))

    async def last_look(self) -> None:
        """Ends the tasks, then reads what is new; to be called once nothing more can come."""
        await self._end_tasks()
        if self._trainer is not None:
            self._recording.extend(self._trainer.read())
        if self._gateway is not None:
            await self.look("the last look")

    def _begin(self, watching: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(watching))

    async def _end_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)  # who waits for a task has raised its failure


class GatewayWatcher:
    """Reads /status and /admin/timeline."""

    def __init__(self, url: str, recording: Recording, session: httpx.AsyncClient) -> None:
        self._url = url
        self._recording = recording
        self._session = session
        self._next = 0
        self._silent = False
        self._lock = asyncio.Lock()  # two readers at once would read the same events

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                await self.look()
                self._silent = False
            except httpx.HTTPError as error:
                if not self._silent:
                    self._recording.add(_warning(f"the gateway does not answer: {error!r}"))
                self._silent = True
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def look(self) -> None:
        """Reads everything that is new."""
        async with self._lock:
            while await self._page() == TIMELINE_PAGE:
                pass
            answer = await self._get("/status")
            try:
                status = msgspec.convert(answer, GatewayStatus, strict=False)
            except msgspec.ValidationError as error:
                raise DemoError(f"the gateway's /status is not what the demo reads: {error}") from error
            self._recording.add(msgspec.structs.replace(status, t=time.time()))

    async def _page(self) -> int:
        page = await self._get(f"/admin/timeline?after={self._next}&limit={TIMELINE_PAGE}")
        for raw in page["events"]:
            event = timeline_event(raw)
            if event is not None:
                self._recording.add(event)
        self._next = page["next"]
        return len(page["events"])

    async def _get(self, path: str) -> Any:
        return (await self._session.get(self._url + path)).raise_for_status().json()


async def watch_versions(name: str, client: RelayClient, model: str, recording: Recording) -> None:
    """Records when a relay holds, seals or drops a version. Runs until it is cancelled."""
    async for event in client.watch(model):
        seen = event.version
        recording.add(
            RelaySeen(
                t=time.time(),
                relay=name,
                version=seen.version,
                kind=event.kind,
                bytes_done=seen.size_bytes,
                bytes_total=seen.size_bytes,
                sealed_unix_s=seen.sealed_unix_s,
            )
        )


async def watch_transfers(name: str, client: RelayClient, model: str, recording: Recording) -> None:
    """Records the progress of versions on their way into a relay. Runs until it is cancelled."""
    silent = False
    while True:
        try:
            status = await client.status()
            silent = False
            for transfer in status.transfers:
                if transfer.model == model:
                    recording.add(_progress(name, transfer.version, transfer.bytes_done, transfer.bytes_total))
        except LaminarError as error:
            if not silent:
                recording.add(_warning(f"{name} does not answer: {error}"))
            silent = True
        await asyncio.sleep(TRANSFER_INTERVAL_S)


class TrainerEvents:
    """Reads the trainer's JSON lines as they come; an unfinished last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Observation]:
        """What was added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + (1 if whole else 0)
        events = (trainer_event(json.loads(line)) for line in whole.splitlines() if line)
        return [event for event in events if event is not None]


async def watch_trainer(events: TrainerEvents, recording: Recording) -> None:
    """Runs until it is cancelled."""
    while True:
        recording.extend(events.read())
        await asyncio.sleep(STATUS_INTERVAL_S)


def _progress(relay: str, version: int, done: int, total: int) -> RelaySeen:
    return RelaySeen(t=time.time(), relay=relay, version=version, kind="transfer", bytes_done=done, bytes_total=total)


def _warning(text: str) -> Note:
    return Note(t=time.time(), kind="warning", text=text)
