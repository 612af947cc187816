"""`paramserver credentials`: a fleet's CA, certificates and fleet key, made, renewed, replaced and shown."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from protos.access.fleet import FLEET_ROLES
from protos.options import DIRECTORY, Group

if TYPE_CHECKING:  # it imports `cryptography`, which no other command needs
    from paramserver.credentials.fleet import Fleet, Holder

DAYS = 365
DAYS_MAX = 3650
_DAY_S = 86_400.0

NEXT_STEP = {
    "add": "a second CA is trusted and a second fleet key accepted, and the former ones are still used. Copy the "
    "directories to their holders, wait some seconds, and run this again",
    "use": "new certificates and the new fleet key are used, and the former ones are still accepted. Copy the "
    "directories to their holders, wait some seconds, and run this again",
    "drop": "the former CA and fleet key are not accepted any more. Copy the directories to their holders: it is done",
}

directory_argument = click.argument("directory", metavar="DIR", type=DIRECTORY)
days_option = click.option(
    "--days", type=click.IntRange(1, DAYS_MAX), default=DAYS, help="How long certificates are valid."
)
host_option = click.option(
    "--host", "hosts", multiple=True, help="A name or address by which a relay is reached, besides loopback's."
)


@click.group("credentials", cls=Group)
def credentials() -> None:
    """Makes and shows a fleet's credentials: who may use its relays.

    \b
    Example:
      paramserver credentials init ./fleet --host trainer-0 --host engines-0
      paramserver serve --credentials ./fleet/relay --host trainer-0 ...
      LAMINAR_CREDENTIALS=./fleet/admin paramserver status --relay trainer-0:7070
    """


@credentials.command()
@directory_argument
@host_option
@days_option
def init(directory: Path, hosts: tuple[str, ...], days: int) -> None:
    """Makes a CA, a fleet key, and a directory with a certificate for each role in a new DIR.

    Keep DIR/ca.key where nobody else comes; holders get their own directory each, such as DIR/relay.
    """
    from paramserver.credentials.fleet import Fleet

    _show(Fleet.init(directory, hosts, days))


@credentials.command()
@directory_argument
@click.argument("role", type=click.Choice(FLEET_ROLES))
@click.argument("name")
@host_option
@days_option
def issue(directory: Path, role: str, name: str, hosts: tuple[str, ...], days: int) -> None:
    """Issues a certificate for one more holder, in DIR/NAME."""
    holder = _fleet(directory).issue(role, name, hosts, days)
    click.echo(f"{holder.directory} has the certificate of {holder.identity}, valid until {_date(holder)}")


@credentials.command()
@directory_argument
@click.argument("names", metavar="[NAME]...", nargs=-1)
@days_option
def renew(directory: Path, names: tuple[str, ...], days: int) -> None:
    """Replaces certificates, of all holders where none is named, by new ones for the same roles, names and hosts.

    Copy the directories to their holders: daemons read them again within some seconds.
    """
    for holder in _fleet(directory).renew(names, days):
        click.echo(f"{holder.directory} has a new certificate of {holder.identity}, valid until {_date(holder)}")


@credentials.command()
@directory_argument
@days_option
def rotate(directory: Path, days: int) -> None:
    """Makes the next of three steps in which a new CA and fleet key replace the present ones, without a restart.

    So whatever was issued before is worth nothing in the end: a way to withdraw a certificate, too.
    """
    step = _fleet(directory).rotate(days)
    click.echo(f"step {[*NEXT_STEP].index(step) + 1} of 3: {NEXT_STEP[step]}")


@credentials.command()
@directory_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def show(directory: Path, as_json: bool) -> None:
    """Shows the certificates in DIR: whose they are, and when they expire."""
    _show(_fleet(directory), as_json=as_json)


def _fleet(directory: Path) -> Fleet:
    from paramserver.credentials.fleet import Fleet

    return Fleet(directory)


def _show(fleet: Fleet, *, as_json: bool = False) -> None:
    from protos.access.certificates import expires_unix_s, fingerprint

    cas = [(fingerprint(ca), expires_unix_s(ca)) for ca in fleet.cas()]
    holders = list(fleet.holders())
    if as_json:
        shown = [{**dataclasses.asdict(holder), "directory": str(holder.directory)} for holder in holders]
        of_cas = [{"fingerprint": name, "expires_unix_s": expires} for name, expires in cas]
        click.echo(msgspec.json.encode({"cas": of_cas, "holders": shown, "fleet_keys": fleet.num_fleet_keys}).decode())
        return
    for name, expires in cas:
        click.echo(f"CA {name}: {_until(expires)}")
    click.echo(f"{fleet.num_fleet_keys} fleet key{'s' if fleet.num_fleet_keys > 1 else ''}")
    rows = [("directory", "role", "name", "valid until", "CA", "hosts"), *map(_row, holders)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _row(holder: Holder) -> tuple[str, ...]:
    return (
        str(holder.directory),
        holder.identity.role,
        holder.identity.name,
        _until(holder.expires_unix_s),
        holder.ca,
        ", ".join(holder.hosts),
    )


def _until(expires_unix_s: float) -> str:
    left = (expires_unix_s - time.time()) / _DAY_S
    date = time.strftime("%Y-%m-%d", time.gmtime(expires_unix_s))
    return f"{date} (expired)" if left <= 0 else f"{date} ({left:.0f} days)"


def _date(holder: Holder) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(holder.expires_unix_s))
