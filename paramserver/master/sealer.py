"""From announced to sealed or given up: the transactions of a master about one version.

Invariants:
- a version is announced in the registry under the guard that its number is new;
- sealing is one transaction: "I am master in this epoch, and this version has neither seal nor end"; a
  transaction whose outcome is not known is settled by reading back before anything is answered;
- a version that cannot be sealed any more ends as aborted, and its ticket says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine

import msgspec

from paramserver.core import view as keys
from paramserver.core.records import Ended, Epoch, Manifest, Sealed
from paramserver.master.drafts import Draft
from paramserver.membership.registry import Absent, Put
from paramserver.relay.member_lease import RETRY_S, MemberLease
from paramserver.relay.relay import Relay
from paramserver.troubles import Troubles
from protos.errors import LaminarError, StaleEpoch, Unavailable

log = logging.getLogger(__name__)

UNFORESEEN_RETRY_S = 1.0
REASON_MAX = 1000  # characters of why a version was given up: the registry keeps them, and everybody is told


class Sealer:
    """Owns the tasks that record and seal: at most two for each draft."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._tasks: set[asyncio.Task[None]] = set()
        self._troubles = Troubles(log)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- announced

    def announce(self, draft: Draft) -> None:
        """Records the announcement in the background: the trainer copies meanwhile, and sealing waits for it."""
        draft.recording = self._spawn(self._try_to_record(draft))

    async def _try_to_record(self, draft: Draft) -> None:
        try:
            await self._record(draft)
        except Unavailable as error:
            version = draft.manifest.version
            log.warning("version %d is announced here only until the registry is back: %s", version, error)
        except StaleEpoch as error:
            log.info("%s", error)
            if draft.state == "writing":  # one that was committed is settled by who seals it
                self.fail(draft, self._why_stale(draft))
        except LaminarError as error:  # what the registry refuses now it refuses whenever it is asked
            self.fail(draft, f"it cannot be announced: {error}")
        except Exception as error:  # noqa: BLE001  (who seals it tries again)
            self._troubles.met(f"{draft.snapshot} is announced here only", error)

    def _why_stale(self, draft: Draft) -> str:
        """Why this relay may not seal the version, as far as it can know."""
        seen = self._relay.view.masters.get(draft.manifest.model)
        if seen is not None and not self._relay.seat.is_master(draft.manifest.model):
            return f"{seen.master.name} became master"
        return "this relay lost its election: its lease in the registry ran out"

    async def _record(self, draft: Draft) -> None:
        """Writes the announcement, after which relays begin to fetch."""
        manifest = draft.manifest
        key = keys.version_key(manifest.model, manifest.version, "announced")
        writes = [
            Put(key, msgspec.json.encode(draft.announced)),
            Put(keys.plan_key(manifest.model), msgspec.json.encode(draft.announced.plan)),
        ]
        seat = self._relay.seat
        if not await seat.as_master(manifest.epoch, manifest.model, [Absent(key)], writes):
            await self._relay.refresh()
            if seat.epoch(manifest.model) != manifest.epoch:
                raise StaleEpoch(f"{self._relay.config.name} is no longer master of {manifest.model}")
        draft.recorded = True  # the only other writer of this key in this epoch is an earlier try of this call
        log.info("%s is in the registry: relays fetch it", draft.snapshot)

    # ---- sealed

    def begin(self, draft: Draft) -> None:
        """All is written: seals in the background, however long the registry is away."""
        self._spawn(self._seal_until_settled(draft))

    async def _seal_until_settled(self, draft: Draft) -> None:
        """Retries while the registry is away: the version stays at `copied` until the outcome is known."""
        if draft.recording is not None:
            await draft.recording
        while draft.state == "committed":
            try:
                await self._try_to_seal(draft)
            except Unavailable as error:
                self._troubles.met(f"{draft.snapshot} is not sealed yet", error)
                await asyncio.sleep(RETRY_S)
            except LaminarError as error:
                self.fail(draft, f"it cannot be sealed: {error}")
            except Exception as error:  # noqa: BLE001  (its ticket is in doubt, not lost; it is tried again)
                self._troubles.met(f"{draft.snapshot} is not sealed yet", error)
                await asyncio.sleep(UNFORESEEN_RETRY_S)
        self._troubles.over(f"{draft.snapshot} is not sealed yet")

    async def _try_to_seal(self, draft: Draft) -> None:
        try:
            if not draft.recorded:
                await self._record(draft)
            await self._seal(draft)
        except StaleEpoch as error:
            await self._read_back(draft, str(error))

    async def _seal(self, draft: Draft) -> None:
        manifest = draft.manifest
        sealed = Sealed(
            manifest.model,
            manifest.version,
            manifest.step,
            manifest.run,
            draft.root,
            manifest.size_bytes,
            time.time(),
        )
        seal_key = keys.version_key(manifest.model, manifest.version, "sealed")
        guards = [Absent(seal_key), Absent(keys.version_key(manifest.model, manifest.version, "ended"))]
        draft.in_doubt = True
        done = await self._relay.seat.as_master(
            manifest.epoch, manifest.model, guards, [Put(seal_key, msgspec.json.encode(sealed))]
        )
        if done:
            self._sealed(draft, sealed)
        else:
            await self._read_back(draft, "the sealing transaction was refused")

    async def _read_back(self, draft: Draft, why: str) -> None:
        """Settles a doubt: an earlier try may have sealed it, or a newer master may have ended it."""
        await self._relay.refresh()
        state = self._relay.of(draft.manifest.model).get(draft.manifest.version)
        assert state is not None
        if state.sealed is not None and state.sealed.root_digest == draft.root:
            self._sealed(draft, state.sealed)
        else:
            self.fail(draft, why)

    def _sealed(self, draft: Draft, sealed: Sealed) -> None:
        draft.state = "sealed"
        log.info("%s sealed, root %s", draft.snapshot, sealed.root_digest)
        self._relay.record(sealed.model, sealed.version, sealed)
        self._relay.wake()

    def fail(self, draft: Draft, reason: str) -> None:
        """Ends a version that was never sealed, here and (when this relay may still say so) for everybody."""
        if draft.state in ("sealed", "failed"):
            return
        reason = reason[:REASON_MAX]
        draft.state, draft.reason = "failed", reason
        manifest = draft.manifest
        log.warning("%s is given up: %s", draft.snapshot, reason)
        ended = Ended("aborted", reason)
        if not self.is_current(draft):
            return
        self._relay.record(manifest.model, manifest.version, ended)
        self._relay.spawn(self._write_end(manifest, ended))
        self._relay.wake()

    async def _write_end(self, manifest: Manifest, ended: Ended) -> None:
        try:
            await end_version(self._relay.seat, manifest.model, manifest.version, manifest.epoch, ended)
        except (Unavailable, StaleEpoch) as error:
            log.info("the next master ends version %d: %s", manifest.version, error)

    def is_current(self, draft: Draft) -> bool:
        """Whether the number is still this draft's: one never recorded may be given again by another master."""
        state = self._relay.of(draft.manifest.model).get(draft.manifest.version)
        of = state.announced.manifest.epoch if state is not None and state.announced is not None else None
        return of is None or of == draft.manifest.epoch


async def end_version(seat: MemberLease, model: str, version: int, epoch: Epoch, ended: Ended) -> None:
    """Records the end of a version, as its model's master. What was sealed can be lost, but not aborted."""
    key = keys.version_key(model, version, "ended")
    guards = [Absent(key)]
    if ended.why == "aborted":
        guards.append(Absent(keys.version_key(model, version, "sealed")))
    await seat.as_master(epoch, model, guards, [Put(key, msgspec.json.encode(ended))])
