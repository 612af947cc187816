"""What the two ends of a data connection prove to each other, and the keys that follow from it. Pure.

Each end has shown a nonce of its own, and both know a fleet key. A proof is a MAC of which end it is, how the
connection is protected, and both nonces; the requester's also of its greeting, and so of the model, the version and
the relay that it means.

Invariants:
- no proof is good twice: each end has chosen a part of what is proven, anew for each connection;
- no proof of one end is one of the other, nor one for a connection that is protected in another way;
- each direction of a connection has a key of its own, which no other connection has.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NONCE_BYTES = 32
PROOF_BYTES = 32
KEY_ID_BYTES = 8

Protection = Literal["mac", "tls"]
_CONTEXT = b"laminar data port 1"


@dataclass(frozen=True, slots=True)
class Opening:
    """What both ends know before either has proven anything."""

    protection: Protection
    requester_nonce: bytes
    holder_nonce: bytes

    def holder_proof(self, fleet_key: bytes) -> bytes:
        return self._mac(fleet_key, b"holder")

    def requester_proof(self, fleet_key: bytes, greeting: bytes) -> bytes:
        """`greeting`: as it is sent, byte for byte."""
        return self._mac(fleet_key, b"requester", greeting)

    def key_to_holder(self, fleet_key: bytes, greeting: bytes) -> bytes:
        """Of what the requester sends after its greeting."""
        return self._mac(fleet_key, b"key to holder", greeting)

    def key_to_requester(self, fleet_key: bytes, greeting: bytes) -> bytes:
        return self._mac(fleet_key, b"key to requester", greeting)

    def _mac(self, key: bytes, what: bytes, *more: bytes) -> bytes:
        parts = (_CONTEXT, what, self.protection.encode(), self.requester_nonce, self.holder_nonce, *more)
        return hmac.digest(key, b"".join(struct.pack("!I", len(part)) + part for part in parts), hashlib.sha256)


def key_id(fleet_key: bytes) -> bytes:
    """Says which of a fleet's keys is meant, and nothing about it: the keys are random."""
    return hmac.digest(fleet_key, _CONTEXT + b" key id", hashlib.sha256)[:KEY_ID_BYTES]


def key_in_common(ours: Sequence[bytes], theirs: Sequence[bytes]) -> bytes | None:
    """The first of our fleet keys whose id the other end has named."""
    return next((key for key in ours if key_id(key) in theirs), None)


def is_proof(found: bytes, expected: bytes) -> bool:
    """In a time that says nothing about where they differ."""
    return hmac.compare_digest(found, expected)
