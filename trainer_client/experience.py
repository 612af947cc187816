"""Reading experience from the gateway: `ExperienceReader` for a plain training loop, `AsyncExperienceReader`.

Invariants:
- a batch is leased, not taken: acknowledged, it is gone; otherwise it returns to the buffer when the lease ends,
  so a trainer that dies in a step loses nothing;
- every request has a deadline: the wait asked of the gateway plus `timeout_s`;
- errors carry the gateway's own words and code; what does not speak its language is said to be something else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import httpx
import msgspec

from protos.errors import BY_CODE, InvalidRequest, LaminarError, OutOfCapacity, Unavailable
from trainer_client.loop import LoopThread
from trainer_client.trajectories import Packed, Trajectory, pack

MSGPACK = "application/msgpack"
WAIT_S = 30.0
LEASE_S = 600.0
"""How long a sampled batch stays this reader's without an acknowledgement."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Trajectories leased to this reader; empty when none came within the wait."""

    lease_id: str
    trajectories: tuple[Trajectory, ...]

    def __len__(self) -> int:
        return len(self.trajectories)

    def pack(self) -> Packed:
        return pack(self.trajectories)


class Wanted(TypedDict, total=False):
    """What to sample: `trajectories` or `groups` (of `group_size` each), and how."""

    trajectories: int
    groups: int
    group_size: int
    wait_s: float  # how long the gateway may wait for all of it; default 30
    staleness_max: int  # leave out what is staler at use; default: the gateway's bound
    drop_equal_rewards: bool  # groups all of whose rewards are equal are dropped for good
    lease_s: float  # how long the batch stays this reader's unacknowledged; default 600


def _request(reader: str, trainer_version: int, wanted: Wanted) -> dict[str, Any]:
    """The body of a sample request, complete with defaults."""
    if ("trajectories" in wanted) == ("groups" in wanted):
        raise InvalidRequest("sample needs either `trajectories` or `groups`", hint="pass one of the two")
    return {
        "reader": reader,
        "trainer_version": trainer_version,
        "wait_s": WAIT_S,
        "lease_s": LEASE_S,
        **wanted,
    }


class _SampleAnswer(msgspec.Struct):
    lease_id: str
    trajectories: list[Trajectory]


class _ErrorBody(msgspec.Struct):
    message: str
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


class AsyncExperienceReader:
    """Samples finished trajectories from the gateway at `gateway` (its base URL).

    `trainer_version` is the newest version that this trainer published; the gateway measures staleness at use
    against it. Set it after each publish.
    """

    def __init__(
        self, gateway: str, *, reader: str = "trainer", trainer_version: int = 0, timeout_s: float = 30.0
    ) -> None:
        self.reader = reader
        self.trainer_version = trainer_version
        self._url = gateway.rstrip("/")
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(timeout=timeout_s, trust_env=False)  # a cluster-internal address, never a proxy
        self._decoder = msgspec.msgpack.Decoder(_SampleAnswer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def sample(self, **wanted: Unpack[Wanted]) -> Batch:
        """Leases up to `trajectories`, or up to `groups` whole groups of `group_size`, oldest first.

        Waits up to `wait_s` for them and returns what there is, possibly nothing. Unavailable when the gateway
        does not answer, InvalidRequest when it refuses what was asked.
        """
        body = _request(self.reader, self.trainer_version, wanted)
        answer = await self._post("/experience/sample", body, timeout_s=body["wait_s"] + self._timeout_s)
        try:
            sampled = self._decoder.decode(answer.content)
        except msgspec.DecodeError as error:
            raise Unavailable(f"{self._url} answered with something else than a batch: {error}", hint=_WRONG) from error
        return Batch(sampled.lease_id, tuple(sampled.trajectories))

    async def ack(self, batch: Batch) -> None:
        """Ends the lease of a batch that was used. NotFound when it had ended: others may sample it again."""
        await self._post("/experience/ack", {"lease_id": batch.lease_id}, timeout_s=self._timeout_s)

    async def batches(self, **wanted: Unpack[Wanted]) -> AsyncGenerator[Batch, None]:
        """Batches without end, none empty; each is acknowledged when the loop comes back for the next."""
        while True:
            batch = await self.sample(**wanted)
            if batch.trajectories:
                yield batch
                await self.ack(batch)

    async def _post(self, path: str, body: dict[str, object], *, timeout_s: float) -> httpx.Response:
        try:
            answer = await self._http.post(self._url + path, json=body, headers={"Accept": MSGPACK}, timeout=timeout_s)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise InvalidRequest(f"gateway address {self._url!r}: {error}", hint=_ADDRESS) from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(f"no answer from the gateway at {self._url}: {reason}", hint=_ADDRESS) from error
        if answer.is_error:
            raise _error_of(answer, self._url)
        return answer


_ADDRESS = "pass the URL that `gateway serve` prints, such as http://127.0.0.1:8080"
_WRONG = "is another server listening there? `gateway serve` prints its URL"


def _error_of(answer: httpx.Response, url: str) -> LaminarError:
    """The gateway's error as the class that its code names."""
    try:
        body = msgspec.json.decode(answer.content, type=_ErrorAnswer).error
    except msgspec.DecodeError:
        return Unavailable(f"{url} answered {answer.status_code} without a gateway's error body", hint=_WRONG)
    kind = BY_CODE.get(body.code or "", LaminarError)
    if issubclass(kind, OutOfCapacity):
        return kind(body.message, retry_after_s=float(answer.headers.get("Retry-After", 1.0)))
    return kind(body.message)


class ExperienceReader:
    """`AsyncExperienceReader` for a plain training loop; use it as a context manager, or call `close`."""

    def __init__(
        self, gateway: str, *, reader: str = "trainer", trainer_version: int = 0, timeout_s: float = 30.0
    ) -> None:
        self._twin = AsyncExperienceReader(gateway, reader=reader, trainer_version=trainer_version, timeout_s=timeout_s)
        self._loop = LoopThread("laminar-experience")

    @property
    def trainer_version(self) -> int:
        """The newest version that this trainer published."""
        return self._twin.trainer_version

    @trainer_version.setter
    def trainer_version(self, version: int) -> None:
        self._twin.trainer_version = version

    def sample(self, **wanted: Unpack[Wanted]) -> Batch:
        """As `AsyncExperienceReader.sample`."""
        return self._loop.run(self._twin.sample(**wanted))

    def ack(self, batch: Batch) -> None:
        """As `AsyncExperienceReader.ack`."""
        self._loop.run(self._twin.ack(batch))

    def batches(self, **wanted: Unpack[Wanted]) -> Generator[Batch, None, None]:
        """As `AsyncExperienceReader.batches`."""
        source = self._twin.batches(**wanted)
        try:
            while True:
                yield self._loop.run(anext(source))
        finally:
            if not self._loop.closed:
                self._loop.run(source.aclose())

    def close(self) -> None:
        if not self._loop.closed:
            try:
                self._loop.run(self._twin.close())
            finally:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
