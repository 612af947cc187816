"""`python -m gateway.engines.embedded` is `gateway engine`."""

from gateway.engines.embedded.cli import engine

if __name__ == "__main__":
    engine(prog_name="gateway engine")
