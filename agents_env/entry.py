"""Where the command `agents-env` begins: without what the extra `envs` brings it says so, in place of a traceback."""

from __future__ import annotations


def main() -> None:
    try:
        from agents_env.cli import main as command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        from protos.extras import install, lacking

        names = lacking("envs") or [error.name]
        raise SystemExit(f"Error: not installed: {', '.join(names)}; {install('envs')}") from None
    command()
