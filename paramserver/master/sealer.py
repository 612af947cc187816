"""From announced to sealed or given up: the transactions of a master about one version.

Invariants:
- a version is announced in the registry under the guard that its number is new;
- sealing is one transaction, the commit point, with three guards: this relay is master in the version's epoch, and the
  version has neither a seal nor an end;
- a transaction whose outcome is unknown is *in doubt*: it is settled by reading back before any ticket reports it;
- a version that cannot be sealed any more ends as aborted, and its ticket reports why.

Why doubts are read back: etcd may have applied a transaction whose reply was lost. Taken for failed, the version would
be given up while other relays show it as sealed; sent again without a look, it would be refused by its own guard (there
is a seal now), and that refusal looks like another master's.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from paramserver.core import view as keys
from paramserver.core.records import Ended, Epoch, Manifest, Sealed
from paramserver.core.spans import publish_span, relay_trace
from paramserver.master.drafts import Draft, Drafts
from paramserver.membership.registry import RETRY_S, Absent, Put
from paramserver.relay.elections import Elections
from paramserver.relay.models import ModelTable
from paramserver.relay.reconciler import Reconciler
from paramserver.relay.relay import Relay
from protos.errors import LaminarError, StaleEpoch, Unavailable
from protos.failures import FailureLog
from protos.tasks import Tasks
from protos.telemetry.logs import about
from protos.telemetry.spans import Tracer

log = logging.getLogger(__name__)

UNFORESEEN_RETRY_S = 1.0
REASON_MAX = 1000  # characters of why a version was given up: the registry keeps them, and every ticket shows them


class Sealer:
    """Owns the tasks that record and seal: at most two for each draft."""

    def __init__(
        self,
        elections: Elections,
        relay: Relay,
        reconciler: Reconciler,
        *,
        models: ModelTable,
        drafts: Drafts,
        relay_tasks: Tasks,
        relay_name: str,
        tracer: Tracer | None = None,
    ) -> None:
        """`relay_tasks` are finished before the relay gives its lease up; the sealer's own are cancelled."""
        self._elections, self._relay, self._reconciler = elections, relay, reconciler
        self._models, self._drafts = models, drafts
        self._relay_tasks, self._tasks = relay_tasks, Tasks(log)
        self._failures = FailureLog(log)
        self._name, self._tracer = relay_name, tracer

    async def close(self) -> None:
        await self._tasks.close()

    # ---- announced

    def announce(self, draft: Draft) -> None:
        """Records the announcement in the background: the trainer copies meanwhile, and sealing waits for it."""
        draft.recording = self._tasks.start(self._try_to_record(draft))

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
        except LaminarError as error:  # a refusal, not an outage: another try would be refused, too
            self.fail(draft, f"it cannot be announced: {error}")
        except Exception as error:  # noqa: BLE001  (who seals it tries again)
            self._failures.failed(f"{draft.snapshot} is announced here only", error)

    def _why_stale(self, draft: Draft) -> str:
        """Why this relay may not seal the version, as far as its view goes."""
        other = self._elections.other_master(draft.manifest.model)
        if other:
            return f"{other} became master"
        return "this relay lost its election: its lease in the registry ran out"

    async def _record(self, draft: Draft) -> None:
        """Writes the announcement, after which relays begin to fetch.

        A refusal means that the key is there, or that the election is over; the fresh view distinguishes the two. The
        key can only be an earlier try of this call, whose reply was lost: within this epoch nobody else writes it.
        """
        manifest = draft.manifest
        key = keys.version_key(manifest.model, manifest.version, "announced")
        writes = [
            Put(key, msgspec.json.encode(draft.announced)),
            Put(keys.plan_key(manifest.model), msgspec.json.encode(draft.announced.plan)),
        ]
        if not await self._elections.as_master(manifest.epoch, manifest.model, [Absent(key)], writes):
            await self._relay.refresh()
            self._elections.check(manifest.epoch, manifest.model)
        draft.recorded = True
        log.info("%s is in the registry: relays fetch it", draft.snapshot)

    # ---- sealed

    def begin(self, draft: Draft) -> None:
        """Every byte is committed: seals in the background, however long the registry is away."""
        self._tasks.start(self._seal_until_settled(draft))

    async def _seal_until_settled(self, draft: Draft) -> None:
        """Retries while the registry is away: the version stays at *copied* until the outcome is known."""
        if draft.recording is not None:
            await draft.recording
        while draft.state == "committed":
            try:
                await self._try_to_seal(draft)
            except Unavailable as error:
                self._failures.failed(f"{draft.snapshot} is not sealed yet", error)
                await asyncio.sleep(RETRY_S)
            except LaminarError as error:
                self.fail(draft, f"it cannot be sealed: {error}")
            except Exception as error:  # noqa: BLE001  (its ticket is in doubt, not lost; it is tried again)
                self._failures.failed(f"{draft.snapshot} is not sealed yet", error)
                await asyncio.sleep(UNFORESEEN_RETRY_S)
        self._failures.recovered(f"{draft.snapshot} is not sealed yet")

    async def _try_to_seal(self, draft: Draft) -> None:
        try:
            if not draft.recorded:
                await self._record(draft)
            await self._seal(draft)
        except StaleEpoch as error:
            await self._read_back(draft, str(error))

    async def _seal(self, draft: Draft) -> None:
        manifest = draft.manifest
        sealed = Sealed.of(manifest, draft.root, time.time(), draft.announced.labels)
        seal_key = keys.version_key(manifest.model, manifest.version, "sealed")
        guards = [Absent(seal_key), Absent(keys.version_key(manifest.model, manifest.version, "ended"))]
        draft.in_doubt = True
        done = await self._elections.as_master(
            manifest.epoch, manifest.model, guards, [Put(seal_key, msgspec.json.encode(sealed))]
        )
        if done:
            self._sealed(draft, sealed)
        else:
            await self._read_back(draft, "the sealing transaction was refused")

    async def _read_back(self, draft: Draft, why: str) -> None:
        """Settles a doubt: an earlier try may have sealed the version, or a newer master may have ended it."""
        await self._relay.refresh()
        state = self._models.of(draft.manifest.model).get(draft.manifest.version)
        assert state is not None
        if state.sealed is not None and state.sealed.root_digest == draft.root:
            self._sealed(draft, state.sealed)
        else:
            self.fail(draft, why)

    def _sealed(self, draft: Draft, sealed: Sealed) -> None:
        draft.state = "sealed"
        log.info("%s sealed, root %s", draft.snapshot, sealed.root_digest, extra=self._about(draft))
        self._record_span(draft)
        self._reconciler.record(sealed.model, sealed.version, sealed)

    def fail(self, draft: Draft, reason: str) -> None:
        """Ends a version that was never sealed: here, and in the registry if this relay is still master."""
        if draft.state in ("sealed", "failed"):
            return
        reason = reason[:REASON_MAX]
        draft.state, draft.reason = "failed", reason
        manifest = draft.manifest
        log.warning("%s is given up: %s", draft.snapshot, reason, extra=self._about(draft))
        self._record_span(draft, error=reason)
        ended = Ended("aborted", reason)
        if not self._drafts.is_current(draft):
            return
        self._reconciler.record(manifest.model, manifest.version, ended)
        self._relay_tasks.start(self._write_end(manifest, ended))

    def _about(self, draft: Draft) -> dict[str, str | int]:
        trace = relay_trace(draft.announced.labels, self._name)
        return about(trace, model=draft.manifest.model, version=draft.manifest.version)

    def _record_span(self, draft: Draft, *, error: str = "") -> None:
        if self._tracer is None:
            return
        span = publish_span(
            draft.manifest,
            draft.announced.labels,
            self._name,
            announced_unix_s=draft.announced_unix_s,
            ended_unix_s=time.time(),
            error=error,
        )
        if span is not None:
            self._tracer.record(span)

    async def _write_end(self, manifest: Manifest, ended: Ended) -> None:
        try:
            await end_version(self._elections, manifest.model, manifest.version, manifest.epoch, ended)
        except (Unavailable, StaleEpoch) as error:
            log.info("the next master ends version %d: %s", manifest.version, error)


async def end_version(elections: Elections, model: str, version: int, epoch: Epoch, ended: Ended) -> None:
    """Records the end of a version, as its model's master. What was sealed can be lost, but not aborted."""
    key = keys.version_key(model, version, "ended")
    guards = [Absent(key)]
    if ended.why == "aborted":
        guards.append(Absent(keys.version_key(model, version, "sealed")))
    await elections.as_master(epoch, model, guards, [Put(key, msgspec.json.encode(ended))])
