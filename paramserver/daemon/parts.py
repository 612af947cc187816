"""One relay, put together: each part is made once, with the parts that it needs.

Invariants:
- an arrow goes one way: no part gets another one after it was made;
- whoever needs a relay without its ports (tests, the simulator) makes it here, as the process does.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from paramserver.client.relay import RelayClient
from paramserver.config import RelayConfig
from paramserver.core.notices import Notices
from paramserver.core.refused_loads import RefusedLoads
from paramserver.data.nixl.processes import NixlProcesses
from paramserver.data.secured import DataAccess
from paramserver.data.spill import Spill
from paramserver.master.claims import RunClaims
from paramserver.master.comparison import Comparison
from paramserver.master.drafts import Drafts
from paramserver.master.duties import MasterDuties, dial_briefly
from paramserver.master.publications import Publications
from paramserver.master.sealer import Sealer
from paramserver.memory.allocator import PoolAllocator
from paramserver.memory.store import Store
from paramserver.relay.changes import Changes
from paramserver.relay.elections import Elections
from paramserver.relay.fetches import Fetches
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.models import ModelTable
from paramserver.relay.pins import RelayPins
from paramserver.relay.reconciler import Reconciler
from paramserver.relay.relay import Relay
from paramserver.relay.watchers import Watchers
from protos.access.credentials import Credentials
from protos.tasks import Tasks
from protos.telemetry.spans import Tracer

log = logging.getLogger(__name__)


class RelayParts:
    """Each part owns its state. `tasks` are finished before the relay gives its lease up."""

    def __init__(
        self,
        config: RelayConfig,
        lease: MemberLease,
        store: Store,
        *,
        notices: Notices | None = None,
        spill: Spill | None = None,
        nixl: NixlProcesses | None = None,
        bind_host: str = "",
        credentials: Credentials | None = None,
        dial: Callable[[str], RelayClient] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`bind_host`: the address that connections to other relays come from; "": any. `credentials`: with which this
        relay calls others. `dial`: see MasterDuties."""
        self.config, self.lease, self.store, self.spill = config, lease, store, spill
        self.notices = notices or Notices()
        self.credentials = credentials
        dial = dial or functools.partial(dial_briefly, credentials=credentials)
        self.tasks, self.changes = Tasks(log), Changes()
        self.elections = Elections(lease.registry, lease)
        self.models = ModelTable(config.name, lease.view, retain=config.retain)
        self.pins = RelayPins(lease.registry, config.name, models=self.models, store=store, tasks=self.tasks)
        self.watchers = Watchers(self.models)
        self.allocator = PoolAllocator(store.pool, self.tasks)
        self.data_access = DataAccess(credentials, tls=config.data_tls) if credentials is not None else None
        self.fetches = Fetches(
            config, lease, self.models, spill=spill, nixl=nixl, bind_host=bind_host, access=self.data_access
        )
        self.reconciler = Reconciler(
            lease,
            self.elections,
            models=self.models,
            store=store,
            allocator=self.allocator,
            pins=self.pins,
            fetches=self.fetches,
            watchers=self.watchers,
            spill=spill,
            tasks=self.tasks,
            changes=self.changes,
            tracer=tracer,
        )
        self.relay = Relay(
            lease,
            self.reconciler,
            models=self.models,
            store=store,
            allocator=self.allocator,
            pins=self.pins,
            changes=self.changes,
        )
        self.drafts, self.refused_loads = Drafts(self.models), RefusedLoads()
        self.sealer = Sealer(
            self.elections,
            self.relay,
            self.reconciler,
            models=self.models,
            drafts=self.drafts,
            relay_tasks=self.tasks,
            relay_name=config.name,
            tracer=tracer,
        )
        self.claims = RunClaims(self.elections, self.drafts, self.sealer, self.changes)
        self.duties = MasterDuties(
            lease, self.elections, self.relay, models=self.models, drafts=self.drafts, claims=self.claims, dial=dial
        )
        self.publications = Publications(
            config,
            lease,
            self.elections,
            self.reconciler,
            models=self.models,
            store=store,
            allocator=self.allocator,
            pins=self.pins,
            drafts=self.drafts,
            claims=self.claims,
            sealer=self.sealer,
            comparison=Comparison(self.models, store, self.refused_loads),
            tracer=tracer,
        )

    async def run(self) -> None:
        """The standing tasks of a relay that has its lease; returns only with an error."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.lease.keep())
            group.create_task(self.lease.holdings.run())
            group.create_task(self.relay.follow())
            group.create_task(self.relay.housekeep())
            group.create_task(self.duties.run())

    def end_streams(self) -> None:
        """Ends the streams that would otherwise wait for ever: watches, runs, tickets."""
        self.watchers.close()
        self.changes.close()

    async def close(self) -> None:
        """Ends fetches and what runs in the background, and starts no more of either. After `run` was cancelled."""
        await self.sealer.close()
        self.changes.close()
        self.fetches.cancel_all()
        self.allocator.stop()
        await self.tasks.join()
        self.fetches.close()
