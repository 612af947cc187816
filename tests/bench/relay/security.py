"""The price of protecting a hop: 1 GiB from one relay's pool into another's, sealed and over TLS, against plain.

The method is that of `hop`: warm memory, two processes over loopback, each with the number of stripes that is best for
it, rounds interleaved. Both ends share the machine's cores, so the figures say what protection costs in processor time
as well as in time. The first figures are what the library's ways of making a MAC do on one core, by
which AES-GCM was chosen.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from paramserver.credentials.fleet import Fleet
from tests.bench.figures import Figure, median
from tests.bench.relay.contenders import Contender, best_settings, files, interleave, project

NUM_BYTES = 1 << 30
INTERLEAVED = 5
STRIPES = [{"stripes": 1}, {"stripes": 2}, {"stripes": 4}]
RECORD_BYTES = 256 << 10
MAC_BYTES = 256 << 20


def lacking() -> list[str]:
    return []


def run() -> Iterator[Figure]:
    yield from _macs()
    directory = Path(tempfile.mkdtemp(prefix="laminar-bench-"))
    try:
        Fleet.init(directory / "fleet", (), 30)
        with files(NUM_BYTES) as where:
            plain, _ = best_settings(project("ours"), STRIPES, where)
            for name, what, tls in (("sealed", "sealed by AES-GCM", False), ("tls", "over TLS 1.3", True)):
                more: dict[str, Any] = {"credentials": str(directory / "fleet" / "relay"), "tls": tls}
                best, tried = best_settings(project("ours"), [{**one, **more} for one in STRIPES], where)
                with Contender(project("ours"), plain, where) as bare, Contender(project("ours"), best, where) as ours:
                    pairs = interleave(ours, bare, INTERLEAVED)
                yield median(
                    f"hop_{name}_vs_plain",
                    f"a hop's time {what}, {best['stripes']} stripes, over a plain one, {plain['stripes']} stripes",
                    [mine / theirs for mine, theirs in pairs],
                    better="reported",
                    details={
                        "bytes": NUM_BYTES,
                        "protected_s": [round(mine, 4) for mine, _ in pairs],
                        "plain_s": [round(theirs, 4) for _, theirs in pairs],
                        "tried_s": tried,
                    },
                )
    finally:
        shutil.rmtree(directory)


def _macs() -> Iterator[Figure]:
    """On one core, in records as they are sent."""
    record, into = memoryview(bytearray(RECORD_BYTES)), memoryview(bytearray(RECORD_BYTES + 16))
    key, gcm, chacha = bytes(32), AESGCM(bytes(16)), ChaCha20Poly1305(bytes(32))
    ways: dict[str, Callable[[bytes], object]] = {
        "hmac_sha256": lambda nonce: hmac.digest(key, record, hashlib.sha256),
        "blake2b": lambda nonce: hashlib.blake2b(record, key=key, digest_size=16).digest(),
        "gmac": lambda nonce: gcm.encrypt(nonce, b"", record),
        "aes_gcm": lambda nonce: gcm.encrypt_into(nonce, record, None, into),
        "chacha20_poly1305": lambda nonce: chacha.encrypt_into(nonce, record, None, into),
    }
    for name, make in ways.items():
        rates = []
        for _ in range(INTERLEAVED):
            started = time.perf_counter()
            for number in range(MAC_BYTES // RECORD_BYTES):
                make(number.to_bytes(12, "big"))
            rates.append(MAC_BYTES / (time.perf_counter() - started) / 1e9)
        yield median(
            f"mac_{name}_gb_s", f"{name} of records of 256 KiB on one core", rates, better="reported", unit="GB/s"
        )
