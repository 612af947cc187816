"""The commands `gateway export` and `gateway import`."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protos.errors import LaminarError
from protos.extras import install
from protos.process import setup_logging
from protos.terminal import Failed

if TYPE_CHECKING:
    from gateway.tables.exports import Exported
    from gateway.tables.imports import Imported

STORE_HELP = "A gateway's --data directory, whether it runs or not; or the URL of one that runs, with any store."


class Moment(click.ParamType[float]):
    """A time: as ISO 8601 writes it, in this machine's time zone unless it names one, or in seconds since 1970."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return datetime.datetime.fromisoformat(str(value)).timestamp()
        except ValueError:
            pass
        try:
            found = float(str(value))
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            self.fail(f"{value!r} is no time, such as 2026-03-31T18:00 or 1774980000", param, context)
        return found


@click.command(name="export")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--store", metavar="DIRECTORY|URL", required=True, help=STORE_HELP)
@click.option("--version-min", type=click.IntRange(min=0), help="Sampled under this version or newer ones alone.")
@click.option("--version-max", type=click.IntRange(min=0), help="Sampled under this version or older ones alone.")
@click.option("--since", type=Moment(), help="Finished then or later: 2026-03-31T18:00, or seconds since 1970.")
@click.option("--until", type=Moment(), help="Finished before this time.")
@click.option(
    "--after",
    type=click.IntRange(min=0),
    default=0,
    help="Finished after the one of this number: the last one that an export printed, for the next part.",
)
@click.option("--unread", is_flag=True, help="Only what no reader has, or has acknowledged; else all of the store.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many sessions, the earliest first.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def export(out: Path, store: str, force: bool, **wanted: Any) -> None:
    """Writes finished trajectories to a Parquet file, a row each; the store stays as it is.

    \b
      gateway export --store /data/gateway rollouts.parquet
      gateway export --store http://127.0.0.1:8080 rollouts.parquet
      python -c 'import pandas; print(pandas.read_parquet("rollouts.parquet"))'
    docs/reference/tables.md has the columns. Needs pyarrow, which the extra `parquet` brings.
    """
    setup_logging("warning")
    with _errors():
        exports = _needing_pyarrow("gateway.tables.exports")
        found: Exported = exports.export_table(store, out, exports.Wanted(**wanted), force=force)
    click.echo(found.described(out))
    if found.num_damaged:
        raise Failed(
            f"{found.num_damaged} sessions of the store are damaged: the log above names them, and the file lacks them"
        )


@click.command(name="import")
@click.argument("table", metavar="IN", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--store", type=click.Path(path_type=Path), required=True, help="A --data directory, new or of a stopped gateway."
)
def import_(table: Path, store: Path) -> None:
    """Adds the trajectories of an exported Parquet file to a store, for trainers to read.

    Sessions that the store has already are left as they are, so that an import may be repeated. The whole file is
    checked first: a damaged one, or one of something else, adds nothing.

    \b
      gateway import --store /data/gateway rollouts.parquet
    """
    setup_logging("warning")
    with _errors():
        imports = _needing_pyarrow("gateway.tables.imports")
        found: Imported = asyncio.run(imports.import_table(table, store))
    click.echo(found.described(table))


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (LaminarError, OSError) as error:
        raise Failed(str(error)) from error


def _needing_pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise Failed(f"Parquet needs pyarrow: {install('parquet')}") from error
