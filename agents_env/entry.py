"""Where the command `agents-env` begins: without what the extra `envs` brings it says so, in place of a traceback."""

from __future__ import annotations


def main() -> None:
    try:
        from agents_env.cli import main as command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        raise SystemExit(f"Error: {error.name} is not installed: pip install 'laminar-rl[envs]'") from None
    command()
