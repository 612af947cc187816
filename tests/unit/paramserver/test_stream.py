"""Copies beside the caches: every byte, at every alignment, and no byte more."""

from __future__ import annotations

import numpy as np
import pytest

from paramserver.data import stream

PAGES = 4 * 4096  # copied side by side
SIZES = [0, 1, 63, 64, 65, PAGES - 1, PAGES, PAGES + 65, 3 * PAGES + 4097, stream.STREAM_BYTES_MIN + 1]


@pytest.mark.parametrize("built", [True, False])
def test_every_byte_is_copied_and_none_beside_it(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    if built:
        assert stream._copy is not None, "`make env` compiles stream.c"
    else:
        monkeypatch.setattr(stream, "_copy", None)
    monkeypatch.setattr(stream, "STREAM_BYTES_MIN", 1)
    source = np.random.default_rng(0).integers(1, 256, max(SIZES) + 256, np.uint8)
    for size in SIZES:
        for to, of in [(0, 0), (1, 0), (0, 1), (17, 33), (63, 64), (64, 1)]:
            target = np.zeros(size + 256, np.uint8)
            stream.copy(memoryview(target)[to : to + size], memoryview(source)[of : of + size])
            assert np.array_equal(target[to : to + size], source[of : of + size])
            assert not target[:to].any()
            assert not target[to + size :].any()


def test_what_does_not_fit_or_may_not_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes do not fit 4"):
        stream.copy(memoryview(bytearray(4)), memoryview(bytes(5)))
    with pytest.raises(ValueError, match="read-only"):
        stream.copy(memoryview(bytes(4)), memoryview(bytes(4)))


def test_a_read_only_source_is_fine() -> None:
    source = bytes(range(256)) * (stream.STREAM_BYTES_MIN // 256)
    target = bytearray(len(source))
    stream.copy(memoryview(target), memoryview(source))
    assert target == source
