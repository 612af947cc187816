"""Generates the committed gRPC code: `python -m protos.generate`; `--check` fails when it is stale."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "protos" / "laminar").rglob("*.proto"))
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(into: Path) -> None:
    """Runs protoc with the Python, gRPC and type-stub plugins; `into` mirrors the repository root."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    flags = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    status = protoc.main(["protoc", f"-I{ROOT}", *flags, *(str(source) for source in SOURCES)])
    if status != 0:
        raise SystemExit("protoc failed; `pip install grpcio-tools mypy-protobuf` if a plugin is missing")


def _generated(root: Path) -> dict[str, str]:
    found = (path for pattern in GENERATED for path in (root / "protos").rglob(pattern))
    return {str(path.relative_to(root)): path.read_text() for path in found}


def stale() -> list[str]:
    """Committed files that differ from what the sources generate now."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = _generated(Path(scratch)), _generated(ROOT)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        names = stale()
        if names:
            sys.stderr.write(f"stale: {', '.join(names)}; run `python -m protos.generate` and commit\n")
        return 1 if names else 0
    if arguments:
        sys.stderr.write("usage: python -m protos.generate [--check]\n")
        return 2
    generate(ROOT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
