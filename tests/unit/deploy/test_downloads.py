"""What set-up is going to download: the files of pip's report, their sizes, and the words for them."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import downloads, setup_env
from deploy.downloads import Downloads, File, described, resolve, sized

MIB = 1 << 20


def row(name: str, url: str, version: str = "1.0") -> dict[str, object]:
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": url}}


class _Server(http.server.BaseHTTPRequestHandler):
    """Tells the size of what ends in .whl, refuses to tell any other."""

    def do_HEAD(self) -> None:
        known = self.path.endswith(".whl")
        self.send_response(200 if known else 405)
        if known:
            self.send_header("Content-Length", str(7 * MIB))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_servers_and_folders_are_asked_for_the_sizes(server: str, tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-py3.whl"
    wheel.write_bytes(bytes(3 * MIB))
    found = sized(
        [
            row("torch", wheel.as_uri(), "2.13.0+cpu"),
            row("numpy", f"{server}/numpy.whl"),
            row("pycosat", f"{server}/pycosat.tar.gz"),
            row("lost", "http://127.0.0.1:9/lost.whl"),
        ],
        downloads._size_of,
    )
    assert (found.remote_bytes, found.local_bytes, found.num_unknown) == (7 * MIB, 3 * MIB, 2)
    assert described(found) == (
        "at least 7 MiB to download, 3 MiB from folders of this machine, 2 files whose size the index does not give"
    )
    assert not found.wants_cuda("x86_64")


def test_a_build_for_cuda_is_named_with_what_it_costs_and_what_avoids_it() -> None:
    found = Downloads(
        [
            File("torch", "2.13.0", False, 500 * MIB),
            File("nvidia-cublas", "13", False, 2048 * MIB),
            File("numpy", "2", False, MIB),
        ]
    )
    assert "2.5 GiB to download. 2.5 GiB of it are torch 2.13.0 and CUDA" in described(found)
    assert f"LAMINAR_TORCH_INDEX={downloads.CPU_INDEX}" in described(found)
    assert found.wants_cuda("x86_64")
    assert not found.wants_cuda("aarch64")
    assert found.disk_bytes > 5 << 30  # what was installed took 5.3 GB


def test_the_index_for_torch_is_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMINAR_TORCH_INDEX", raising=False)
    assert setup_env.torch_index() == ()
    monkeypatch.setenv("LAMINAR_TORCH_INDEX", downloads.CPU_INDEX)
    assert setup_env.torch_index() == ("--extra-index-url", downloads.CPU_INDEX)


def test_a_pip_that_fails_leaves_the_size_unknown() -> None:
    """The installation that follows fails with the same, and shows pip's own words."""
    assert resolve([sys.executable, "-c", "raise SystemExit(1)"], []) is None


def test_a_pip_that_does_not_end_leaves_the_size_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "RESOLVE_TIMEOUT_S", 0.2)
    assert resolve([sys.executable, "-c", "import time; time.sleep(60)"], []) is None


def index(folder: Path, *versions: str) -> str:
    """A package index of one's own, in a folder: torch, in these versions, without contents."""
    import zipfile

    page = folder / "torch"
    page.mkdir(parents=True)
    names = [f"torch-{version}-py3-none-any.whl" for version in versions]
    for name, version in zip(names, versions, strict=True):
        with zipfile.ZipFile(page / name, "w") as wheel:
            told = f"torch-{version}.dist-info"
            wheel.writestr(f"{told}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{told}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{told}/RECORD", "")
    (page / "index.html").write_text("".join(f'<a href="{name.replace("+", "%2B")}">{name}</a>' for name in names))
    return folder.as_uri()


@pytest.mark.slow
def test_the_cpu_build_of_the_other_index_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index(tmp_path / "index", "2.13.0"))
    monkeypatch.setenv("LAMINAR_TORCH_INDEX", index(tmp_path / "torch's", "2.13.0+cpu"))
    pip = [str(setup_env.shared_environment() / "bin" / "python"), "-m", "pip"]
    found = resolve(pip, ["--no-deps", "torch==2.13.0", *setup_env.torch_index()])
    assert found is not None
    assert found.torch == "2.13.0+cpu"
