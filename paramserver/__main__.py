"""The `paramserver` command, also as `python -m paramserver`."""

import os

from protos.imports import uncollected


def main() -> None:
    """Sets what gRPC reads when it is imported, or strangers could fill the log: a line for each failed handshake."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    with uncollected():
        from paramserver.cli import main as command
    command()


if __name__ == "__main__":
    main()
