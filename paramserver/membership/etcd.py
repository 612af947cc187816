"""The registry in etcd.

Traps of the client that this module covers: a call without a timeout may wait for ever; its watch reconnects by itself
and reports nothing of what it missed, and leaves a task behind each time that nobody ends, so streams of watches are
made here; its own keepalive reports life through an outage; a message of more than gRPC's limit fails whole, so lists
come in pages of one revision; keys may be any bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

import grpc
import grpc.aio
from etcd3aio import Etcd3Client, EtcdError, EtcdPermissionDeniedError, EtcdUnauthenticatedError
from etcd3aio._protobuf import WatchCreateRequest, WatchRequest
from etcd3aio.kv import KVService, prefix_range_end

from paramserver.membership.registry import (
    RETRY_S,
    Absent,
    Changed,
    Entry,
    Event,
    Guard,
    Outcome,
    Put,
    Removed,
    State,
    Write,
    check_size,
)
from protos.access.etcd import EVERYBODY, EtcdAccess
from protos.errors import InvalidRequest, LaminarError, TooLarge, Unavailable

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
START_TIMEOUT_S = 10.0
"""At the start there is no last view to go on with: the process would end for an etcd that is busy for a moment."""
SIGN_IN_S = 120.0  # a token of etcd's is good for 300 s after its last use, by default
RECONNECT_MAX_S = 1.0  # an etcd that is back is found within this, however long it was away
PAGE_KEYS = 256  # of a list in one answer; fewer when their values are too large for one message
MESSAGE_BYTES_MAX = 16 << 20  # an answer; gRPC's default of 4 MiB is less than one watch may bring after an outage
_EVENT_DELETE = 1

T = TypeVar("T")


class EtcdRegistry:
    """One connection to an etcd at "host:port". `timeout_s` bounds each call, and may be changed between two.

    Keys are in etcd below the prefix of `access`, of which nobody who calls knows. InvalidRequest for an `access` that
    cannot be used.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = CALL_TIMEOUT_S, access: EtcdAccess = EVERYBODY) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._access, self._prefix = access, access.etcd_prefix
        self._signed_in_at = -math.inf  # monotonic; long ago: the next call signs in first
        self._signing_in = asyncio.Lock()
        self._client = Etcd3Client([endpoint], rpc_max_attempts=1, ca_cert=access.ca())
        self._client._manager.grpc_options += [  # else the channel looks again only every two minutes in the end
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", round(RECONNECT_MAX_S * 1000)),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ]
        self._client._manager.target = f"dns:///{endpoint}"  # it makes "ipv4:" targets, to which names are no address

    @classmethod
    async def connect(
        cls, endpoint: str, *, timeout_s: float = CALL_TIMEOUT_S, access: EtcdAccess = EVERYBODY
    ) -> EtcdRegistry:
        """Connects and reads one key. Unavailable when nothing that speaks etcd answers there; InvalidRequest where it
        answers, and not to this user."""
        registry = cls(endpoint, timeout_s=timeout_s, access=access)
        try:
            await registry._client.connect()
            await registry.list("/laminar/store")
        except _NotAllowed as error:
            await registry.close()
            raise InvalidRequest(error.message, hint=error.hint) from error
        except (Unavailable, ValueError) as error:
            await registry.close()
            by_tls = " by TLS" if access.etcd_cacert else ""
            raise Unavailable(
                f"no etcd answers{by_tls} at {endpoint}",
                hint="start one with `paramserver etcd`, or give --etcd the HOST:PORT of a running one; one with TLS "
                "wants --etcd-cacert",
            ) from error
        except LaminarError:
            await registry.close()
            raise
        return registry

    async def list(self, prefix: str) -> State:
        """Everything below `prefix` at one revision, in as many pages as it takes."""
        there = self._prefix + prefix
        while True:
            try:
                return await self._list(there.encode(), prefix_range_end(there))
            except _CompactedMeanwhile:
                log.info("the list of %s was compacted before its last page; listing again", prefix)

    async def _list(self, key: bytes, range_end: bytes) -> State:
        entries: list[Entry] = []
        revision, limit = 0, PAGE_KEYS
        while True:
            await self._sign_in()
            get = self._kv.get(key, range_end, revision=revision, limit=limit, timeout=self.timeout_s)
            try:
                reply = await self._call(get, "list")
            except _MessageTooLarge:
                if limit == 1:
                    raise
                limit //= 2
                continue
            revision = revision or reply.header.revision
            entries += [Entry(self._key(kv.key), kv.value, kv.create_revision) for kv in reply.kvs]
            if not reply.more:
                return State(tuple(entries), revision)
            key = reply.kvs[-1].key + b"\0"

    async def transact(self, guards: Sequence[Guard], writes: Sequence[Write]) -> Outcome:
        check_size(guards, writes)
        compare = [
            KVService.txn_compare_create_revision(self._prefix + g.key, 0 if isinstance(g, Absent) else g.revision)
            for g in guards
        ]
        operations = [
            KVService.txn_op_put(self._prefix + w.key, w.value, lease=w.lease)
            if isinstance(w, Put)
            else KVService.txn_op_delete(self._prefix + w.key)
            for w in writes
        ]
        await self._sign_in()
        reply = await self._call(self._kv.txn(compare, operations, timeout=self.timeout_s), "transact")
        return Outcome(reply.succeeded, reply.header.revision)

    async def grant(self, ttl_s: float) -> int:
        await self._sign_in()
        assert self._client.lease is not None
        reply = await self._call(self._client.lease.grant(max(1, round(ttl_s)), timeout=self.timeout_s), "grant")
        return int(reply.ID)

    async def keep_alive(self, lease: int) -> bool:
        await self._sign_in()
        return await self._call(self._keep_alive_once(lease), "keep_alive")

    async def _keep_alive_once(self, lease: int) -> bool:
        assert self._client.lease is not None
        stream = self._client.lease.keep_alive(lease)
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await stream.read()
            return bool(getattr(reply, "TTL", 0) > 0)  # EOF: the server ended the stream
        finally:
            stream.cancel()

    async def revoke(self, lease: int) -> None:
        await self._sign_in()
        assert self._client.lease is not None
        await self._call(self._client.lease.revoke(lease, timeout=self.timeout_s), "revoke")

    async def watch(self, prefix: str) -> AsyncIterator[Event]:
        """Lists, then follows from that revision; lists again whenever the stream ends or was compacted."""
        while True:
            try:
                state = await self.list(prefix)
            except Unavailable:
                await asyncio.sleep(RETRY_S)
                continue
            yield state
            async for event in self._follow(prefix, state.revision + 1):
                yield event

    async def _follow(self, prefix: str, revision: int) -> AsyncIterator[Event]:
        """Events until the history may have a gap: compacted, cancelled, broken, or a store that started over."""
        watch = self._client.watch
        assert watch is not None
        there = self._prefix + prefix
        stream = watch._stub.Watch(metadata=watch._metadata or None)
        try:
            await stream.write(_watch_request(there.encode(), prefix_range_end(there), revision))
            while (reply := await stream.read()) is not grpc.aio.EOF:
                if reply.canceled or reply.compact_revision > 0 or reply.header.revision < revision - 1:
                    break
                for event in reply.events:
                    yield self._event(event)
            log.info("the watch on %s may have a gap; listing again", prefix)
        except grpc.aio.AioRpcError as error:
            log.warning("the watch on %s broke (%s); listing again", prefix, _cause(error))
            self._signed_in_at = -math.inf  # it may have been for that
            await asyncio.sleep(RETRY_S)
        finally:
            stream.cancel()

    async def close(self) -> None:
        await self._client.close()

    async def _sign_in(self) -> None:
        """Gets a token of this user, once in a while, and after one was refused."""
        if not self._access.etcd_user:
            return
        async with self._signing_in:
            if time.monotonic() - self._signed_in_at < SIGN_IN_S:
                return
            assert self._client.auth is not None
            try:
                password = await asyncio.to_thread(self._access.password)
            except InvalidRequest as error:
                raise _NotAllowed(error.message, hint=error.hint) from error
            call = self._client.auth.authenticate(self._access.etcd_user, password, timeout=self.timeout_s)
            reply = await self._call(call, "authenticate")
            self._client.set_token(reply.token)
            self._signed_in_at = time.monotonic()

    def _not_signed_in(self, refused: str) -> LaminarError:
        self._signed_in_at = -math.inf  # another token may be good
        return _NotAllowed(refused, hint="--etcd-user, and its password in a file or in the environment")

    def _key(self, raw: bytes) -> str:
        return _text(raw).removeprefix(self._prefix)

    def _event(self, event: object) -> Event:
        kv = event.kv  # type: ignore[attr-defined]
        if event.type == _EVENT_DELETE:  # type: ignore[attr-defined]
            return Removed(self._key(kv.key), kv.mod_revision)
        return Changed(Entry(self._key(kv.key), kv.value, kv.create_revision), kv.mod_revision)

    @property
    def _kv(self) -> KVService:
        assert self._client.kv is not None
        return self._client.kv

    async def _call(self, call: Awaitable[T], what: str) -> T:
        """Awaits the call, and keeps a cancellation.

        grpc.aio swallows one that comes while a call ends, and returns the call's outcome. The cancelled task would go
        on then, for ever if it is a loop: a relay did not end on SIGTERM.
        """
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        try:
            return await self._translate_errors(call, what)
        finally:
            if task.cancelling() > cancelled_before:
                raise asyncio.CancelledError

    async def _translate_errors(self, call: Awaitable[T], what: str) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error.code(), error.details() or error.code().name, what) from error
        except EtcdPermissionDeniedError as error:
            raise self._error(grpc.StatusCode.PERMISSION_DENIED, _cause(error), what) from error
        except EtcdUnauthenticatedError as error:
            raise self._error(grpc.StatusCode.UNAUTHENTICATED, _cause(error), what) from error
        except TimeoutError as error:
            raise Unavailable(f"etcd at {self.endpoint} did not answer {what} within {self.timeout_s:g} s") from error
        except EtcdError as error:
            raise Unavailable(f"etcd at {self.endpoint} did not answer {what}: {_cause(error)}") from error

    def _error(self, code: grpc.StatusCode, details: str, what: str) -> LaminarError:
        """Unavailable when another try may succeed; what etcd refuses each time is no outage."""
        refused = f"etcd at {self.endpoint} refuses {what}: {details}"
        match code:
            case grpc.StatusCode.OUT_OF_RANGE:
                return _CompactedMeanwhile(refused)
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
                return _MessageTooLarge(refused)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                full = "a full one takes writes again once it is compacted, defragmented and `etcdctl alarm disarm` ran"
                return Unavailable(refused, hint=full)
            case grpc.StatusCode.INVALID_ARGUMENT if "too large" in details or "too many" in details:
                return TooLarge(refused)
            case grpc.StatusCode.PERMISSION_DENIED:
                hint = f"grant {self._access.etcd_user or 'the user'} readwrite on {self._prefix}/laminar/ by prefix"
                return _NotAllowed(refused, hint=hint)
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.FAILED_PRECONDITION:
                return self._not_signed_in(refused)
            case grpc.StatusCode.INVALID_ARGUMENT if "auth" in details or "user name" in details:
                return self._not_signed_in(refused)
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(refused)
        return Unavailable(f"etcd at {self.endpoint} did not answer {what}: {details}")


class _NotAllowed(Unavailable):
    """etcd answers, and not to this user. Whoever runs already goes on with the last view, as when it is away: a token
    may have ended, or the operator be about to mend it."""


class _CompactedMeanwhile(Unavailable):
    """The revision of a list's first page is gone before its last one."""


class _MessageTooLarge(TooLarge):
    """An answer, or a request, is larger than one message may be."""


def _watch_request(key: bytes, range_end: bytes, revision: int) -> WatchRequest:
    return WatchRequest(create_request=WatchCreateRequest(key=key, range_end=range_end, start_revision=revision))


def _cause(error: EtcdError | grpc.aio.AioRpcError) -> str:
    """In words: gRPC's own form of an error has many lines."""
    cause = error if isinstance(error, grpc.aio.AioRpcError) else error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        return cause.details() or cause.code().name
    return str(error)


def _text(key: bytes) -> str:
    """A key; what is not UTF-8 in it stands in escapes: such a key must not keep others from being read."""
    return key.decode(errors="backslashreplace")
