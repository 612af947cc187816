"""The output of `paramserver status` and `paramserver versions`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence

import click
import msgspec
from rich.console import RenderableType
from rich.table import Table

from paramserver.client.relay import AccessStatus, ModelStatus, RelayStatus, SealedVersion
from paramserver.config import show_bytes
from protos import terminal
from protos.terminal import add_row, line, say

EXPIRES_SOON_DAYS = 14


def show_status(status: RelayStatus, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(dataclasses.asdict(status))))
        return
    console = terminal.console()
    for part in describe(status):
        console.print(part)


def describe(status: RelayStatus) -> Iterator[RenderableType]:
    """The relay's status in lines and tables, for people."""
    registry = "reachable" if status.registry_reachable else "not usable: going on with the last view"
    yield line(f"relay {status.relay} (instance {status.instance}), registry {registry}, transport {status.transport}")
    if status.draining:
        yield line("draining: it serves what it has and takes no more")
    if status.insecure:
        yield line(
            "INSECURE: its ports take no credentials, and whoever reaches them may do everything (--insecure)",
            "red",
        )
    if status.access is not None:
        yield from _access(status.access)
    for notice in status.notices:
        yield line(f"{_local_time(notice.unix_s)}: {notice.text}", "yellow")
    if status.trouble:
        yield line(f"TROUBLE: {status.trouble}", "red")
    yield line(
        f"pool {show_bytes(status.pool_bytes)}, used {show_bytes(status.used_bytes)}, "
        f"quarantined {show_bytes(status.quarantined_bytes)}"
    )
    yield line(f"members: {', '.join(status.members)}")
    if status.cut_off:
        yield line(f"cut off: {', '.join(status.cut_off)}")
    yield from _engine_ports(status)
    yield from _models(status)
    yield from _transfers(status)
    yield from _pins(status)


def _access(access: AccessStatus) -> Iterator[RenderableType]:
    left_days = (access.expires_unix_s - time.time()) / 86_400
    yield line(
        f"credentials of {access.identity}, valid for {left_days:.1f} days; trusted CAs: {', '.join(access.cas)}; "
        f"fleet keys: {access.num_fleet_keys}",
        "red" if left_days < EXPIRES_SOON_DAYS else "",
    )
    if access.failure:
        yield line(f"CREDENTIALS stay as they were: {access.failure}", "red")


def _engine_ports(status: RelayStatus) -> Iterator[RenderableType]:
    for port in status.engine_ports:
        refused = ", ".join(f"{times} by {reason}" for reason, times in sorted(port.refused.items()) if times)
        yield line(
            f"engine {port.engine} at {port.url}, which leads to {port.target}: {port.open} connections"
            f"{f', refused {refused}' if refused else ''}"
        )


def _models(status: RelayStatus) -> Iterator[RenderableType]:
    if not status.models:
        yield line("no models yet")
    for model in status.models:
        newest = "none" if model.newest_sealed is None else str(model.newest_sealed)
        held = " ".join(map(str, model.versions)) or "none"
        yield line("")
        yield line(
            f"model {model.model}: master {model.master or 'nobody'}, epoch {model.epoch}, newest sealed {newest}, "
            f"held here: {held}"
        )
        for version in model.sealed:
            for name, text in _labels(version):
                yield line(f"version {version.version} {name}: {text}")
        if model.hops:
            yield line(f"chain, plan {model.plan} ({model.plan_reason or 'as before'}):")
            yield _chain(model)
        for one in model.refused_loads:
            times = f" {one.times} times" if one.times > 1 else ""
            yield line(f"engine {one.engine} refused version {one.version}{times}: {one.error}")


def _chain(model: ModelStatus) -> Table:
    table = _table("", "relay", "holds", "newest came from", "over", "at", "")
    for place, hop in enumerate(model.hops, start=1):
        rate = f"{show_bytes(int(hop.rate_bytes_s))}/s" if hop.rate_bytes_s else ""
        note = "" if hop.alive else "away"
        note = f"slow: {hop.slow}" if hop.slow else note
        number = str(place) if hop.relay in model.chain else ""
        add_row(table, number, hop.relay, " ".join(map(str, hop.versions)), hop.upstream, hop.transport, rate, note)
    return table


def _transfers(status: RelayStatus) -> Iterator[RenderableType]:
    for transfer in status.transfers:
        share = transfer.bytes_done / max(1, transfer.bytes_total)
        yield line(
            f"coming: {transfer.model} version {transfer.version} from {transfer.upstream or 'nobody yet'}"
            f"{f' over {transfer.transport}' if transfer.transport else ''}, "
            f"{share:.0%} of {show_bytes(transfer.bytes_total)}"
        )


def _pins(status: RelayStatus) -> Iterator[RenderableType]:
    for pin in status.pins:
        fleet = f", {pin.copies} copies in the fleet" if pin.copies else ""
        yield line(f"pin: {pin.model} version {pin.version} by {pin.holder}, {pin.expires_in_s:.1f} s left{fleet}")


def show_versions(model: str, versions: Sequence[SealedVersion], *, as_json: bool) -> None:
    if as_json:
        for version in versions:
            click.echo(json.dumps(msgspec.to_builtins(dataclasses.asdict(version))))
        return
    if not versions:
        say(f"no sealed version of {model} here yet")
        return
    table = _table("version", "step", "run", "size", "sealed", "root digest")
    labels = [dict(_labels(version)) for version in versions]
    known = dict.fromkeys(name for version in versions for name in version.labels)
    names = [name for name in known if any(name in one for one in labels)]
    for name in names:
        table.add_column(line(name))  # which may be long, and is wrapped
    for version, given in zip(versions, labels, strict=True):
        add_row(
            table,
            str(version.version),
            str(version.step),
            version.run,
            show_bytes(version.size_bytes),
            _local_time(version.sealed_unix_s),
            version.root_digest,
            *(given.get(name, "") for name in names),
        )
    terminal.console().print(table)


def _labels(version: SealedVersion) -> Iterator[tuple[str, str]]:
    """The labels that the version has, as text."""
    return ((name, str(value)) for name, value in version.labels.items() if value)


def _local_time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
