"""One Docker with all images for all tests, and a fleet by the compose file in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.images.__main__ import IMAGES
from tests.images import docker as dockers
from tests.images.docker import Docker


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    if reason := dockers.lacking():
        pytest.skip(reason)
    with dockers.started() as found:
        for image in IMAGES.values():
            found.load(image)
        yield found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that the image's user may read."""
    from tests.support.tiny_model import write_tiny_model

    folder = tmp_path_factory.mktemp("models") / "policy"
    write_tiny_model(folder, "llama", "float32", 0)
    for path in (*folder.parents[:3], folder, *folder.iterdir()):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))
    return folder
