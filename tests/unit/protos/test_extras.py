"""What of an extra is not installed, and the command that installs it, by what pip has noted of this package."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

from protos import extras


class Installed:
    """As `importlib.metadata` has this package, installed from `url`; None: from an index."""

    def __init__(self, url: str | None) -> None:
        self._url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._url is None else json.dumps({"url": self._url})


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("file:///srv/my%20folder/laminar", "/srv/my folder/laminar[redis]"),
        ("file:///tmp/laminar_rl-0.1.0-py3-none-any.whl", "/tmp/laminar_rl-0.1.0-py3-none-any.whl[redis]"),
        (None, "laminar-rl[redis]"),
    ],
)
def test_an_extra_comes_from_where_the_package_came(
    monkeypatch: pytest.MonkeyPatch, url: str | None, source: str
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(url))
    assert extras.install("redis").endswith(f" -m pip install '{source}'")


def test_a_package_that_pip_does_not_know_is_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", unknown)
    monkeypatch.setattr(metadata, "requires", unknown)
    assert extras.install("redis").endswith(f"'{extras.CHECKOUT}[redis]'")
    assert extras.lacking("redis") == []


def test_all_that_lacks_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"openai", "pebble"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    found = extras.lacking("envs")
    assert {"reasoning-gym", "math-verify", "websockets"} <= set(found)
    assert not there & set(found)
    assert found == sorted(found)


WITHOUT = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
from gateway.cli import cli
cli(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["engine", "--model", ".", "--dtype", "float32"], ["engine-dtype"]])
def test_an_engine_without_torch_says_what_to_install(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "the embedded engine needs torch: " in done.stderr
    assert "[engine]'" in done.stderr
    assert "Traceback" not in done.stderr
