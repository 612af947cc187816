"""The relay's status report: members, models with their chain and hops, transfers, pins, pool."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paramserver.core.records import Epoch, Sealed
from paramserver.core.versions import ModelVersions
from paramserver.daemon.parts import RelayParts
from paramserver.data.engine_ports import EnginePort, EnginePortStatistics
from protos.laminar.v1 import relay_pb2 as pb


class StatusReport:
    """Reads the state of the relay's parts and owns none."""

    def __init__(self, parts: RelayParts, *, data_address: str, engine_ports: Sequence[EnginePort]) -> None:
        self._engine_ports = engine_ports
        self._config, self._data_address, self._credentials = parts.config, data_address, parts.credentials
        self._lease, self._view = parts.lease, parts.lease.view
        self._pool, self._pins, self._fetches = parts.store.pool, parts.pins, parts.fetches
        self._models, self._refused_loads, self._notices = parts.models, parts.refused_loads, parts.notices
        self._watchers = parts.watchers

    def reply(self) -> pb.StatusReply:
        pool, now = self._pool.statistics(), time.monotonic()
        return pb.StatusReply(
            relay=self._config.name,
            instance=self._lease.member.instance,
            members=sorted(self._view.members),
            models=[self._model(model) for model in sorted(self._view.models | {m for m, _ in self._models.items()})],
            transfers=[
                pb.TransferStatus(model=m, version=v, upstream=up, transport=by, bytes_done=done, bytes_total=total)
                for m, v, up, by, done, total in self._fetches.transfers()
            ],
            pins=[
                pb.PinStatus(
                    model=p.model, version=p.version, holder=p.holder, expires_in_s=p.expires_at - now, copies=p.copies
                )
                for p in self._pins.all()
            ],
            pool_bytes=pool.pool_bytes,
            used_bytes=pool.used_bytes,
            quarantined_bytes=pool.quarantined_bytes,
            cut_off=sorted(self._fetches.bypassed()),
            registry_reachable=self._lease.reachable,
            data_address=self._data_address,
            transport=self._config.transport,
            draining=self._lease.member.draining,
            trouble=self._lease.trouble,
            store_id=self._view.store_id,
            continues=sorted(self._view.continues),
            insecure=self._config.insecure,
            access=self._access(),
            engine_ports=[_engine_port_message(port.statistics()) for port in self._engine_ports],
            notices=[pb.Notice(unix_s=one.unix_s, text=one.text) for one in self._notices.all()],
            watched=sorted(self._watchers.models()),
        )

    def _access(self) -> pb.Access | None:
        if self._credentials is None:
            return None
        material = self._credentials.material
        return pb.Access(
            identity=str(material.identity),
            expires_unix_s=material.expires_unix_s,
            cas=material.cas,
            num_fleet_keys=len(material.fleet_keys),
            failure=self._credentials.failure,
        )

    def _model(self, model: str) -> pb.ModelStatus:
        seen, plan = self._view.masters.get(model), self._view.plans.get(model)
        versions = self._models.get(model)
        shown = versions.shown() if versions else []
        return pb.ModelStatus(
            model=model,
            master=seen.master.name if seen else "",
            epoch=epoch_message(self._view.epoch(model)),
            plan=plan.number if plan else 0,
            chain=plan.order if plan else (),
            versions=[record.version for record in shown],
            newest_sealed=versions.newest_sealed if versions else None,
            newest_announced=versions.newest_known if versions else 0,
            plan_reason=plan.reason if plan else "",
            hops=self._hops(model, plan.order if plan else (), versions),
            refused_loads=self.refused_loads(model),
            sealed=map(sealed_message, shown),
        )

    def _hops(self, model: str, order: Sequence[str], versions: ModelVersions | None) -> list[pb.HopStatus]:
        stragglers = self._models.stragglers(model)
        held: dict[str, list[int]] = {}
        for version, state in versions.items() if versions else []:
            for name in state.holders if state.ended is None else ():
                held.setdefault(name, []).append(version)
        hops = []
        for name in [*order, *sorted(held.keys() - set(order))]:
            last = stragglers.last(name)
            hops.append(
                pb.HopStatus(
                    relay=name,
                    upstream=last.upstream if last else "",
                    rate_bytes_s=last.rate_bytes_s if last else 0.0,
                    versions=held.get(name, ()),
                    slow=stragglers.reasons.get(name, ""),
                    alive=name in self._view.members,
                    transport=last.transport if last else "",
                )
            )
        return hops

    def refused_loads(self, model: str, version: int | None = None) -> list[pb.RefusedLoad]:
        return [
            pb.RefusedLoad(version=one.version, engine=one.engine, error=one.error, times=one.times, unix_s=one.unix_s)
            for one in self._refused_loads.of(model, version)
        ]


def _engine_port_message(found: EnginePortStatistics) -> pb.EnginePort:
    return pb.EnginePort(
        engine=found.engine,
        url=found.url,
        target=found.target,
        open=found.open,
        handshakes=found.handshakes,
        accepted=found.accepted,
        refused={str(reason): times for reason, times in found.refused.items()},
    )


def epoch_message(epoch: Epoch | None) -> pb.Epoch:
    return pb.Epoch(store_id=epoch.store_id, revision=epoch.revision) if epoch else pb.Epoch()


def sealed_message(record: Sealed) -> pb.SealedVersion:
    return pb.SealedVersion(
        model=record.model,
        version=record.version,
        step=record.step,
        run=record.run,
        root_digest=record.root_digest,
        size_bytes=record.size_bytes,
        sealed_unix_s=record.sealed_unix_s,
        labels=record.labels,
    )
