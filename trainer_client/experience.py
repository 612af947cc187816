"""Reading experience: `ExperienceReader` for a synchronous training loop, `AsyncExperienceReader` for asyncio.

Invariants:
- a batch is leased, not taken: an acknowledged batch is removed, one that is given back may be sampled again at once,
  and any other returns to the buffer when its lease ends. So a trainer that dies in a step loses nothing;
- a batch whose answer was lost, or that nobody waits for any more, is given back once the gateway answers;
- each batch of `batches` ends once: it is acknowledged when the loop asks for the next one and given back when the
  loop is left, unless the caller did either before;
- every request has a deadline: the requested wait plus `timeout_s`;
- an error has the gateway's message and code; a server that is not a gateway is reported as such.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, cast

import httpx
import msgspec

from protos.access.bearer import bearer
from protos.decoding import decode_json
from protos.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    LaminarError,
    NotFound,
    Unavailable,
    VersionUnknown,
    WrongServer,
)
from protos.packed import Damaged, Offer
from trainer_client.batches import ACCEPTED, Batch, batch_of
from trainer_client.gateway_http import (
    WRONG_SERVER,
    NoAnswer,
    Presence,
    Retry,
    download,
    our_transport,
    patiently,
    request,
    root_of,
)
from trainer_client.loop import AsyncClient, SyncClient
from trainer_client.old_run import OnOldRun, check_on_old_run, meet
from trainer_client.unanswered import Unanswered
from trainer_client.wanted import (
    LEASE_S,
    WAIT_S,
    Choice,
    Evicted,
    ExperienceStatistics,
    Returned,
    Rows,
    Wanted,
    check_choice,
    peek_request,
    picked,
    reader_state,
    sample_request,
    version_number,
)

log = logging.getLogger(__name__)

GIVE_BACK_S = 5.0
"""Deadline for giving a batch back when a loop is left; a lease that is not given back ends by itself."""
ANNOUNCED_PATIENCE_S = 60.0
"""How long a sample waits for the announcement of a version, which has to be sealed first."""
ASK = "`gateway status` says why"
SILENT_S = 60.0
"""A loop that waits longer than this for a batch logs a warning, and another one each time the wait has doubled."""
CHOOSE_AGAIN_S = 0.5
"""Between two looks of a strategy of the trainer's own."""
EVICTED_AT_ONCE = 4096
"""Sessions of one request; the gateway takes no more."""
Answer = TypeVar("Answer", bound=msgspec.Struct)


def _by_name(wanted: Wanted, session_ids: Sequence[str]) -> Wanted:
    """Of a strategy of the trainer's own: the sessions that it picked, as they are now."""
    rest: Any = {**wanted, "session_ids": session_ids, "wait_s": 0.0}
    del rest["strategy"]
    return cast(Wanted, rest)


def _is_leased(batch: Batch) -> bool:
    """InvalidRequest for trajectories that were only looked at."""
    if batch and not batch.lease_id:
        raise InvalidRequest("this batch is of a peek, and has no lease", hint="sample what is to be used")
    return bool(batch.lease_id)


class ReaderOptions(TypedDict, total=False):
    """The keyword arguments of a reader."""

    reader: str  # the name of this reader at the gateway; default "trainer"
    trainer_version: int  # default 0: nothing is published yet
    timeout_s: float  # of one request, besides the wait that it asks for; default 30
    rank: int  # which of the readers that share each batch; default 0
    num_ranks: int  # how many those are; default 1
    on_old_run: OnOldRun  # where versions exist and no state was loaded; default "continue", with a warning
    api_key: str | None  # of the gateway's key file, with the role trainer; default: LAMINAR_API_KEY, if that is set


class AsyncExperienceReader(AsyncClient):
    """Samples finished trajectories from the gateway at `gateway` (its base URL).

    `trainer_version` is the newest version that this trainer published; the gateway measures staleness at use
    against it. Set it after each publish.
    """

    def __init__(
        self,
        gateway: str,
        *,
        reader: str = "trainer",
        trainer_version: int = 0,
        timeout_s: float = 30.0,
        rank: int = 0,
        num_ranks: int = 1,
        on_old_run: OnOldRun = "continue",
        api_key: str | None = None,
    ) -> None:
        """`rank` of `num_ranks`: readers of one name share each batch. Each samples the whole batch's size and gets its
        share, whole or nothing; no trajectory is in two shares.

        `on_old_run`: what to do at the first sample where versions exist that this trainer has not published, and
        neither `trainer_version` nor a state was given. "continue" trains on what they sampled, with a warning;
        "refuse" raises Conflict; "discard" leaves it out, and evicts it: publish this run's first weights before."""
        if not 0 <= rank < num_ranks:
            raise InvalidRequest(f"rank {rank} of {num_ranks}", hint="ranks count from 0")
        self.rank, self._num_ranks = rank, num_ranks
        check_on_old_run(on_old_run)
        self._on_old_run: OnOldRun = on_old_run
        self._met = False  # the gateway has said which versions there are
        self._version_min = 0  # the oldest to train on
        self._first_version = 0  # that was set: the first that this trainer published, unless it resumed
        self.reader = reader
        self._trainer_version = version_number(trainer_version)
        self._resumed = self._trainer_version > 0
        self._leased: dict[str, Batch] = {}  # batches that loops over `batches` hold now
        self._return_lock = asyncio.Lock()
        self._unanswered = Unanswered(self._release)
        self._url = root_of(gateway)
        self._presence = Presence(f"the gateway at {self._url}")
        self._timeout_s = timeout_s
        self._credentials = bearer(api_key)
        self._http = httpx.AsyncClient(timeout=timeout_s, headers=self._credentials, **our_transport(self._url))

    @property
    def trainer_version(self) -> int:
        """The newest version that this trainer published."""
        return self._trainer_version

    @trainer_version.setter
    def trainer_version(self, version: int) -> None:
        self._trainer_version = version_number(version)
        self._first_version = self._first_version or version

    async def close(self) -> None:
        """Gives back the batches that loops over `batches` still hold."""
        for batch in list(self._leased.values()):
            await self._return(batch)
        async with self._return_lock:  # waits for a loop that was left and gives its batch back now
            await self._unanswered.close()
            await self._http.aclose()

    async def sample(self, **wanted: Unpack[Wanted]) -> Batch:
        """Leases up to `trajectories`, or up to `groups` whole groups of `group_size`, in the order of `strategy`; or
        the sessions `session_ids`.

        Waits up to `wait_s` for them and returns what there is, possibly nothing: then `why` of the batch has the
        numbers. Waits for a gateway that is away, as every request of a reader does; raises Unavailable after a minute
        without an answer, and WrongServer at once when what answers is no gateway. Raises InvalidRequest when the
        gateway refuses the request, and VersionUnknown when after a minute no relay has announced `trainer_version` of
        the gateway's model.
        """
        if not self._met:
            await self._meet()
        if callable(choose := wanted.get("strategy")):
            check_choice(wanted, self.rank, self._num_ranks)
            return await self._choose(wanted, choose)
        self._check_open()
        batch = await self._once_announced(wanted)
        if not batch and self._version_min:
            await self._evict_old()  # what finished since would keep new sessions from being admitted
        return batch

    async def _meet(self) -> None:
        """Before the first sample: is there an old run?"""
        try:
            found = await self.statistics()
        except Forbidden:
            return  # the sample itself is refused by what this key does not allow
        except NotFound as error:  # a gateway of before there were statistics
            if self._on_old_run != "continue":
                raise InvalidRequest(
                    f"on_old_run={self._on_old_run!r}, and this gateway is too old to say whether there is an old run",
                    hint="upgrade the gateway, or leave on_old_run out",
                ) from error
            log.info("this gateway is too old to say whether there is an old run")
            self._met = True
            return
        if not self._resumed:
            newest, run = found.newest_version, found.newest_run
            if self._first_version:  # published before the first sample, and told of by the publisher
                newest, run = self._first_version - 1, ""
            if newest and (not self._first_version or self._on_old_run != "continue"):
                self._old_run(newest, run)
        self._met = True
        if self._version_min:
            await self._evict_old()

    def _old_run(self, newest: int, run: str) -> None:
        if self._on_old_run == "discard" and not self._first_version:
            raise InvalidRequest(
                f"on_old_run='discard', and versions to {newest} of run {run or 'unknown'} are all that engines have",
                hint="publish this run's first weights, and set trainer_version, before the first sample",
            )
        if self.rank == 0:
            meet(newest, run, self._on_old_run)
        if self._on_old_run == "discard":
            self._version_min = newest + 1

    async def _evict_old(self) -> None:
        def old(rows: Sequence[Offer]) -> list[str]:
            return [row.session_id for row in rows if row.facts.oldest_version < self._version_min]

        done = await self.evict(old)
        if done.evicted:
            log.info("%d sessions of before version %d are discarded", done.evicted, self._version_min)

    async def _once_announced(self, wanted: Wanted) -> Batch:
        """A sample, sent again while no relay has announced `trainer_version`."""
        retry, warned = Retry(self._presence, ANNOUNCED_PATIENCE_S), False
        while True:
            try:
                return await patiently(self._presence, lambda: self._leased_once(wanted))
            except VersionUnknown as error:
                pause_s = retry.pause_s(error)
                if not warned:
                    log.warning("%s; trying again for %.0f s", error, ANNOUNCED_PATIENCE_S)
                warned = True
            await asyncio.sleep(pause_s)

    async def _leased_once(self, wanted: Wanted) -> Batch:
        """One try of a sample. What it leased without a whole answer is given back in the background."""
        body = sample_request(self.reader, self.trainer_version, wanted, self.rank, self._num_ranks)
        if self._version_min:
            body["version_min"] = self._version_min
        lease_id = f"lease-{secrets.token_hex(8)}"
        try:
            answer = await download(
                self._url,
                f"/experience/sample?lease_id={lease_id}",
                body=msgspec.json.encode(body),
                accept=ACCEPTED,
                timeout_s=body["wait_s"] + self._timeout_s,
                credentials=self._credentials,
            )
        except (NoAnswer, asyncio.CancelledError):
            self._unanswered.add(lease_id, body["lease_s"])
            raise
        bound = None
        if wanted.get("strategy") == "staleness_bounded":
            fresh = self.trainer_version - self._version_min
            bound = (self.trainer_version, min(fresh, wanted["staleness_max"]))
        batch = self._batch_of(answer, bound)
        batch.leased_until_s = time.monotonic() + body["lease_s"]
        return batch

    def _batch_of(self, answer: memoryview, bound: tuple[int, int] | None = None) -> Batch:
        try:
            return batch_of(answer, bound)
        except Damaged as error:
            raise WrongServer(
                f"{self._url} answered with something else than a batch: {error}", hint=WRONG_SERVER
            ) from error

    async def peek(self, **wanted: Unpack[Wanted]) -> Batch:
        """What `sample` would get now, up to 256 trajectories, without a lease: others may get them at any time. It
        waits for nothing, and declares no batch: the admission of new sessions stays as it is."""
        self._check_open()
        body = msgspec.json.encode(peek_request(wanted))
        credentials, timeout_s = self._credentials, self._timeout_s

        def send() -> Awaitable[memoryview]:
            return download(
                self._url, "/experience/peek", body=body, accept=ACCEPTED, timeout_s=timeout_s, credentials=credentials
            )

        return self._batch_of(await patiently(self._presence, send))

    async def ack(self, batch: Batch) -> None:
        """Ends the lease of a batch that was used. NotFound when the lease had ended: others may have sampled it again.

        Does nothing for an empty batch, which has no lease.
        """
        await self._end(batch, "/experience/ack")

    async def give_back(self, batch: Batch) -> None:
        """Ends the lease of a batch that was not used: it is sampled again. NotFound when the lease had ended.

        Does nothing for an empty batch, which has no lease.
        """
        await self._end(batch, "/experience/release")

    async def _end(self, batch: Batch, path: str) -> None:
        """NotFound after a try whose answer was lost: that try ended the lease, if it had not run out by itself."""
        if not _is_leased(batch):
            return
        lost: Unavailable | None = None

        async def send() -> None:
            nonlocal lost
            try:
                await self._post_once(path, {"lease_id": batch.lease_id}, timeout_s=self._timeout_s)
            except Unavailable as error:
                lost = error
                raise
            except NotFound:
                if lost is None or time.monotonic() > batch.leased_until_s:
                    raise
                log.info("%s was ended by a try whose answer was lost: %s", batch.lease_id, lost.message)

        self._check_open()
        await patiently(self._presence, send)
        self._leased.pop(batch.lease_id, None)

    async def _release(self, lease_id: str) -> None:
        await self._post_once("/experience/release", {"lease_id": lease_id}, timeout_s=GIVE_BACK_S)

    async def rows(self) -> list[Offer]:
        """What waits for a trainer, without its tokens, in the order of finishes."""
        found: list[Offer] = []
        after: int | None = 0
        while after is not None:
            answer = await self._get("/experience/rows", Rows, query={"after": after})
            found += answer.rows
            after = answer.next_after
        return found

    async def statistics(self) -> ExperienceStatistics:
        """Staleness at generation, finish and use; lengths, rewards and waiting of what was sampled last."""
        return await self._get("/experience/statistics", ExperienceStatistics)

    async def evict(self, choose: Choice) -> Evicted:
        """Removes for good, unused, what `choose` picks of the rows that wait. What is leased by then stays.

        `choose` runs in this process and returns ids of sessions. Of a group that lost a member, readers of groups get
        no member any more: pick whole groups for them.
        """
        ids = picked(choose, await self.rows())
        done = Evicted()
        for begin in range(0, len(ids), EVICTED_AT_ONCE):
            some = {"session_ids": ids[begin : begin + EVICTED_AT_ONCE]}
            part = self._decoded(await self._post("/experience/evict", some), Evicted)
            done = Evicted(done.evicted + part.evicted, done.leased + part.leased, done.missing + part.missing)
        return done

    def state_dict(self, *used: Batch) -> dict[str, Any]:
        """What a checkpoint of the trainer keeps of this reader. `used`: the batches that the checkpoint's weights were
        trained on and that are not acknowledged yet, as the one of a loop over `batches` is until the loop asks for the
        next."""
        for batch in used:
            if not isinstance(batch, Batch):
                raise InvalidRequest(f"{type(batch).__name__} is no batch", hint="pass batches: state_dict(*batches)")
        leases = [batch.lease_id for batch in used if batch.lease_id]
        return {"reader": self.reader, "trainer_version": self.trainer_version, "used": leases}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = reader_state(state)
        if found.reader != self.reader:
            raise InvalidRequest(
                f"the state is of reader {found.reader!r}, and this one is {self.reader!r}", hint="pass reader=..."
            )
        self._trainer_version = max(self.trainer_version, found.trainer_version)
        self._resumed = True

    async def resume(self, *states: Mapping[str, Any]) -> int:
        """Goes on where the checkpoint with the `state_dict` was made, before the first sample: acknowledges what was
        `used`, and gives back whatever else this reader had leased when its process died. Returns how many trajectories
        were given back.

        Each of several ranks passes the states of all ranks, of which there may have been another number: what one has
        to give back is then acknowledged before, if any rank's checkpoint has used it.
        """
        for state in states:
            self.load_state_dict(state)
        for lease_id in dict.fromkeys(lease_id for state in states for lease_id in reader_state(state).used):
            try:
                await self._post("/experience/ack", {"lease_id": lease_id})
            except NotFound as error:
                log.info("%s of the checkpoint was acknowledged before, or its lease ended: %s", lease_id, error)
        held = {"reader": self.reader, "rank": self.rank, "num_ranks": self._num_ranks}
        answer = await self._post("/experience/reclaim", held)
        return self._decoded(answer, Returned).returned

    async def _choose(self, wanted: Wanted, choose: Choice) -> Batch:
        """Samples what `choose` picks of the rows that wait, once it picks any."""
        deadline = time.monotonic() + wanted.get("wait_s", WAIT_S)
        while True:
            ids = picked(choose, await self.rows())
            if ids and (batch := await self.sample(**_by_name(wanted, ids))):
                return batch
            if time.monotonic() >= deadline:
                return Batch("")
            await asyncio.sleep(CHOOSE_AGAIN_S)

    async def batches(self, *, prefetch: int = 0, **wanted: Unpack[Wanted]) -> AsyncGenerator[Batch, None]:
        """An endless series of batches, none empty. Each is acknowledged when the loop asks for the next one.

        A loop that is left by `break`, `return` or an error gives its last batch back: acknowledge it before if it was
        used. Raises NotFound when a step took longer than the lease (`lease_s`): the batch is back in the buffer. A
        loop waits for a gateway that is away; Unavailable after a minute without an answer.

        `prefetch`: how many further batches are sampled in the background meanwhile. They are leased from then on, so
        `lease_s` has to cover all of them, and they are as stale as the version that was set when they were sampled.
        """
        if prefetch < 0:
            raise InvalidRequest(f"prefetch={prefetch}", hint="0 samples each batch when it is needed")
        ahead: deque[asyncio.Task[Batch]] = deque()
        try:
            while True:
                while len(ahead) < 1 + prefetch:
                    ahead.append(asyncio.create_task(self._lease_batch(wanted, list(ahead))))
                batch = await ahead[0]
                ahead.popleft()
                try:
                    yield batch
                    if batch.lease_id in self._leased:
                        await self._acknowledge(batch, wanted.get("lease_s", LEASE_S))
                finally:
                    if batch.lease_id in self._leased:
                        await self._return(batch)
        finally:
            await self._drop(ahead)

    async def _lease_batch(self, wanted: Wanted, before: Sequence[asyncio.Task[Batch]]) -> Batch:
        """The next batch behind those of `before`: one request at a time, in their order."""
        if before:
            await asyncio.wait(before)
        batch = await self._await_batch(wanted)
        self._leased[batch.lease_id] = batch
        return batch

    async def _drop(self, ahead: Sequence[asyncio.Task[Batch]]) -> None:
        """Gives back what was sampled ahead and never used. An error there concerns nobody any more."""
        for task in ahead:
            task.cancel()
        for outcome in await asyncio.gather(*ahead, return_exceptions=True):
            if isinstance(outcome, Batch):
                await self._return(outcome)
            elif isinstance(outcome, LaminarError):
                log.info("a batch that was sampled ahead was not needed: %s", outcome)

    async def _await_batch(self, wanted: Wanted) -> Batch:
        began, logged_s = time.monotonic(), 0.0
        while not (batch := await self.sample(**wanted)):
            waited_s = time.monotonic() - began
            if waited_s >= max(SILENT_S, 2 * logged_s):
                logged_s = waited_s
                what = ", ".join(f"{name}={value}" for name, value in wanted.items())
                log.warning("no batch of %s at %s for %.0f s: %s", what, self._url, waited_s, batch.why or ASK)
        return batch

    async def _acknowledge(self, batch: Batch, lease_s: float) -> None:
        try:
            await self.ack(batch)
        except NotFound as error:
            self._leased.pop(batch.lease_id, None)
            raise NotFound(
                f"the lease of {lease_s:g} s on a batch ended before it was used up: its trajectories went back, "
                f"and are sampled again ({error.message})",
                hint="pass batches(lease_s=...) that is longer than a training step",
            ) from error

    async def _return(self, batch: Batch) -> None:
        """Gives `batch` back: now, or in the background once the gateway answers."""
        async with self._return_lock:
            if self._leased.pop(batch.lease_id, None) is None:
                return
            try:
                await self._release(batch.lease_id)
            except NotFound as error:
                log.info("%s had ended: %s", batch.lease_id, error)
            except Unavailable as error:
                log.info("%s is given back later: %s", batch.lease_id, error)
                self._unanswered.add(batch.lease_id, LEASE_S)
            except LaminarError as error:
                log.warning("a batch of %d comes back when its lease ends: %s", len(batch), error)

    async def _get(self, path: str, kind: type[Answer], query: Mapping[str, int] | None = None) -> Answer:
        async def send() -> bytes:
            return await request(self._http, self._url, path, query=query, timeout_s=self._timeout_s)

        return self._decoded(await patiently(self._presence, send), kind)

    def _decoded(self, answer: bytes, kind: type[Answer]) -> Answer:
        try:
            found: Answer = decode_json(answer, kind)
        except msgspec.DecodeError as error:
            raise WrongServer(f"{self._url} answered with something else: {error}", hint=WRONG_SERVER) from error
        return found

    async def _post(self, path: str, body: Mapping[str, object]) -> bytes:
        """For what may be sent twice."""
        self._check_open()
        return await patiently(self._presence, lambda: self._post_once(path, body, timeout_s=self._timeout_s))

    async def _post_once(self, path: str, body: Mapping[str, object], *, timeout_s: float) -> bytes:
        self._check_open()
        encoded = msgspec.json.encode(body)
        return await request(self._http, self._url, path, body=encoded, timeout_s=timeout_s)

    def _check_open(self) -> None:
        if self._http.is_closed:
            raise Conflict("this reader is closed", hint="open a new one; a closed reader is not used again")


class ExperienceReader(SyncClient[AsyncExperienceReader]):
    """`AsyncExperienceReader` for a synchronous training loop; use it as a context manager, or call `close`."""

    def __init__(self, gateway: str, **options: Unpack[ReaderOptions]) -> None:
        super().__init__(AsyncExperienceReader(gateway, **options), "laminar-experience")

    @property
    def trainer_version(self) -> int:
        """The newest version that this trainer published."""
        return self._client.trainer_version

    @trainer_version.setter
    def trainer_version(self, version: int) -> None:
        self._client.trainer_version = version

    def sample(self, **wanted: Unpack[Wanted]) -> Batch:
        """See `AsyncExperienceReader.sample`."""
        return self._loop.run(self._client.sample(**wanted))

    def peek(self, **wanted: Unpack[Wanted]) -> Batch:
        """See `AsyncExperienceReader.peek`."""
        return self._loop.run(self._client.peek(**wanted))

    def ack(self, batch: Batch) -> None:
        """See `AsyncExperienceReader.ack`."""
        self._loop.run(self._client.ack(batch))

    def give_back(self, batch: Batch) -> None:
        """See `AsyncExperienceReader.give_back`."""
        self._loop.run(self._client.give_back(batch))

    def rows(self) -> list[Offer]:
        """See `AsyncExperienceReader.rows`."""
        return self._loop.run(self._client.rows())

    def statistics(self) -> ExperienceStatistics:
        """See `AsyncExperienceReader.statistics`."""
        return self._loop.run(self._client.statistics())

    def evict(self, choose: Choice) -> Evicted:
        """See `AsyncExperienceReader.evict`."""
        return self._loop.run(self._client.evict(choose))

    def state_dict(self, *used: Batch) -> dict[str, Any]:
        """See `AsyncExperienceReader.state_dict`."""
        return self._client.state_dict(*used)

    def resume(self, *states: Mapping[str, Any]) -> int:
        """See `AsyncExperienceReader.resume`."""
        return self._loop.run(self._client.resume(*states))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `AsyncExperienceReader.load_state_dict`."""
        self._client.load_state_dict(state)

    def batches(self, *, prefetch: int = 0, **wanted: Unpack[Wanted]) -> Generator[Batch, None, None]:
        """See `AsyncExperienceReader.batches`."""
        source = self._client.batches(prefetch=prefetch, **wanted)
        try:
            while True:
                yield self._loop.run(anext(source))
        finally:
            if not self._loop.closed:
                self._loop.run(source.aclose())
