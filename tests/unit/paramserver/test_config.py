"""Configuration: sizes, names, and what is refused."""

from __future__ import annotations

import pytest

from paramserver.config import RelayConfig, parse_bytes, show_bytes
from protos.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "num"),
    [("0", 0), ("4096", 4096), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2tib", 2 << 40), ("64MIB", 64 << 20)],
)
def test_sizes(text: str, num: int) -> None:
    assert parse_bytes(text) == num


@pytest.mark.parametrize("text", ["", "lots", "4GB", "-1", "1 2", "4GiB/s"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_shown_short() -> None:
    assert [show_bytes(num) for num in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5 GiB",
        "3 TiB",
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "a/b"}, "cannot name a relay"),
        ({"retain": 0}, "--retain is 0"),
        ({"chunk_bytes": 10}, "chunks of 10 bytes"),
    ],
)
def test_a_wrong_configuration_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        RelayConfig(**{"name": "a", "etcd": "h:1", **wrong})  # type: ignore[arg-type]
