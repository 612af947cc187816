"""`gateway keys`: the file of API keys, made and added to, and a key of it for a client."""

from __future__ import annotations

from pathlib import Path

import click

from protos.access.key_file import key_in, make_key_file
from protos.access.roles import PURPOSE, ROLES, Role, new_line
from protos.errors import LaminarError
from protos.options import Group
from protos.terminal import Failed

FILE = click.Path(dir_okay=False, path_type=Path)
role_argument = click.argument("role", type=click.Choice(ROLES))


@click.group(cls=Group, epilog="\b\n" + "\n".join(f"{role + ':':9}{PURPOSE[role]}" for role in ROLES))
def keys() -> None:
    """The API keys of `gateway serve --api-keys FILE`.

    The file has a line ROLE NAME KEY for each key, and comments that begin with #. Only its owner may write it, and
    nobody but its owner and group may read it. The gateway reads it again when it changes: to replace a key, add a line
    with the same role and name, give the new key to whoever has the old one, and remove the old line.

    \b
      gateway keys init ./api-keys
      gateway keys new agent runner-1 >> ./api-keys
      gateway serve --host 0.0.0.0 --api-keys ./api-keys ...
      LAMINAR_API_KEY=$(gateway keys get ./api-keys admin) gateway status
    """


@keys.command()
@click.argument("file", type=FILE)
def init(file: Path) -> None:
    """Makes FILE with a key for each role, named after it. Nothing is overwritten."""
    try:
        make_key_file(file)
    except LaminarError as e:
        raise Failed(str(e)) from e
    click.echo(f"{file} has a key for each of {', '.join(ROLES)}")


@keys.command()
@role_argument
@click.argument("name")
def new(role: Role, name: str) -> None:
    """Prints a line with a new key, to be added to the file.

    NAME is whom the key is for, such as runner-1. An agent's sessions belong to its name: keys of one name may end each
    other's.

    \b
      gateway keys new agent runner-1 >> ./api-keys
    """
    try:
        click.echo(new_line(role, name))
    except LaminarError as e:
        raise Failed(str(e)) from e
    click.echo("add this line to the file of --api-keys; its third word is the key", err=True)


@keys.command()
@click.argument("file", type=FILE)
@role_argument
@click.argument("name", required=False)
def get(file: Path, role: Role, name: str | None) -> None:
    """Prints the newest key of a ROLE and a NAME; without NAME of that which `init` made, or of the only one.

    \b
      export LAMINAR_API_KEY=$(gateway keys get ./api-keys trainer)
    """
    try:
        click.echo(key_in(file, role, name))
    except LaminarError as e:
        raise Failed(str(e)) from e
