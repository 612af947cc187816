"""The size of an installation's download, before it starts: pip resolves the files, and servers report their sizes.

Which build of torch an index offers decides between some hundred megabytes and several gigabytes, so nothing is
guessed. `pip install --dry-run --report` lists the files, and reads only their metadata where the index has it. HEAD
requests give the sizes; a file without one is counted and reported as unknown. Standard library only, as set-up is.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIP = "pip>=23.3"
"""Older ones fetch whole packages for a dry run."""
RESOLVE_TIMEOUT_S = 180.0
"""An index with neither metadata nor ranges makes pip fetch whole packages to resolve: it is stopped after so long."""
HEAD_TIMEOUT_S = 10.0
HEADS_AT_ONCE = 16
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, slots=True)
class File:
    """The file of one package; `num_bytes` is None where its server does not report a size."""

    package: str
    version: str
    is_local: bool
    num_bytes: int | None

    @property
    def is_of_cuda(self) -> bool:
        return self.package.startswith(("nvidia-", "cuda-")) or self.package == "triton"


@dataclass(frozen=True, slots=True)
class Downloads:
    """All files of an installation."""

    files: Sequence[File]

    @property
    def remote_bytes(self) -> int:
        return sum(file.num_bytes or 0 for file in self.files if not file.is_local)

    @property
    def local_bytes(self) -> int:
        """Bytes of files from folders of this machine (`--find-links`, `file:` indexes)."""
        return sum(file.num_bytes or 0 for file in self.files if file.is_local)

    @property
    def num_unknown(self) -> int:
        return sum(file.num_bytes is None for file in self.files)

    @property
    def has_cuda(self) -> bool:
        return any(file.is_of_cuda and file.package != "triton" for file in self.files)

    @property
    def disk_bytes(self) -> int:
        """The disk space needed: the files while they are unpacked, and twice as much for their content."""
        return 3 * (self.remote_bytes + self.local_bytes) + (1 << 30)

    def wants_cuda(self, machine: str) -> bool:
        """Whether torch needs CUDA: the default build for x86 does; the version of the CPU build ends in `+cpu`."""
        return machine == "x86_64" and bool(self.torch) and "+cpu" not in self.torch

    @property
    def torch(self) -> str:
        """The version of torch; "" when it is not among the files."""
        return next((file.version for file in self.files if file.package == "torch"), "")


def described(downloads: Downloads) -> str:
    """The sizes for a person to read, and how to make them smaller."""
    least = "at least " if downloads.num_unknown else ""
    parts = [f"{least}{_size(downloads.remote_bytes)} to download"]
    if downloads.local_bytes:
        parts.append(f"{_size(downloads.local_bytes)} from folders of this machine")
    if downloads.num_unknown:
        parts.append(f"{downloads.num_unknown} files whose size the index does not give")
    sizes = ", ".join(parts)
    if not downloads.has_cuda:
        return sizes
    cuda = sum(f.num_bytes or 0 for f in downloads.files if f.is_of_cuda or f.package == "torch")
    return (
        f"{sizes}. {_size(cuda)} of it are torch {downloads.torch} and CUDA's libraries, of use with a GPU only: "
        f"stop this (Ctrl-C) and set LAMINAR_TORCH_INDEX={CPU_INDEX} for the CPU build"
    )


def pins(downloads: Downloads) -> list[str]:
    """The requirements that name exactly these packages."""
    return [f"{file.package}=={file.version}" for file in downloads.files]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def resolve(pip: Sequence[str], arguments: Sequence[str]) -> Downloads | None:
    """The files that `pip install ARGUMENTS` would fetch into an empty environment; None when pip fails.

    An index that fails here fails the installation as well, which then shows pip's output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        dry = ("install", "--dry-run", "--use-feature=fast-deps", "--ignore-installed", "--quiet")
        try:
            done = subprocess.run(
                [*pip, *dry, "--report", str(report), *arguments],
                capture_output=True,
                check=False,
                timeout=RESOLVE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode or not report.exists():
            return None
        rows = json.loads(report.read_text())["install"]
    return sized(rows, _size_of)


def sized(rows: Sequence[Mapping[str, Any]], size_of: Callable[[str], int | None]) -> Downloads:
    """The rows of pip's report, each with the size that `size_of` finds for its address."""
    addresses = [str(row["download_info"]["url"]) for row in rows]
    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        sizes: Iterable[int | None] = pool.map(size_of, addresses)
        return Downloads([_file(row, url, size) for row, url, size in zip(rows, addresses, sizes, strict=True)])


def _file(row: Mapping[str, Any], url: str, num_bytes: int | None) -> File:
    name = str(row["metadata"]["name"]).lower().replace("_", "-")
    return File(name, str(row["metadata"]["version"]), url.startswith("file:"), num_bytes)


def _size_of(url: str) -> int | None:
    """The size of a file on this machine or on a server; None when it is unknown."""
    if url.startswith("file:"):
        path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
        return path.stat().st_size if path.is_file() else None
    try:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - of the lock file; file: was handled
        with urllib.request.urlopen(request, timeout=HEAD_TIMEOUT_S, context=_certificates()) as answer:  # noqa: S310
            length = answer.headers["Content-Length"]
    except (OSError, ValueError, http.client.HTTPException):  # counted as unknown
        return None
    return int(length) if length else None


def _certificates() -> ssl.SSLContext:
    """The certificates that pip is configured with, or else Python's own, which heed SSL_CERT_FILE."""
    bundle = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    return ssl.create_default_context(cafile=bundle if bundle and Path(bundle).is_file() else None)
