"""What two ends of a data connection prove: nothing that is good elsewhere, later, or in the other direction."""

from __future__ import annotations

import itertools

from paramserver.core.handshake import Opening, is_proof, key_id, key_in_common

KEY, OTHER = b"k" * 32, b"o" * 32
NONCES = (b"1" * 32, b"2" * 32)
GREETINGS = (b'{"model":"a","version":1,"to":"x"}', b'{"model":"a","version":2,"to":"x"}', b"")


def values(opening: Opening, key: bytes) -> list[bytes]:
    of_greetings = [
        each(key, greeting)
        for greeting in GREETINGS
        for each in (opening.requester_proof, opening.key_to_holder, opening.key_to_requester)
    ]
    return [opening.holder_proof(key), *of_greetings]


def test_nothing_is_the_same_for_another_end_direction_nonce_key_greeting_or_protection() -> None:
    found = [
        value
        for protection in ("mac", "tls")
        for first, second in itertools.product(NONCES, NONCES)
        for key in (KEY, OTHER)
        for value in values(Opening(protection, first, second), key)  # type: ignore[arg-type]
    ]
    assert len(found) == 2 * 4 * 2 * 10
    assert len(set(found)) == len(found)
    assert all(len(value) == 32 for value in found)


def test_both_ends_compute_the_same() -> None:
    ours, theirs = (Opening("mac", *NONCES) for _ in range(2))
    assert values(ours, KEY) == values(theirs, KEY)
    assert is_proof(ours.holder_proof(KEY), theirs.holder_proof(KEY))
    assert not is_proof(ours.holder_proof(OTHER), theirs.holder_proof(KEY))
    assert not is_proof(b"", theirs.holder_proof(KEY))


def test_parts_of_what_is_proven_cannot_be_moved_into_each_other() -> None:
    one, other = Opening("mac", b"ab", b"c"), Opening("mac", b"a", b"bc")
    assert one.holder_proof(KEY) != other.holder_proof(KEY)


def test_the_key_that_both_know_is_found_by_its_id() -> None:
    ids = [key_id(key) for key in (KEY, OTHER)]
    assert len({*ids}) == 2
    assert key_in_common([KEY, OTHER], [ids[1]]) == OTHER
    assert key_in_common([KEY, OTHER], ids[::-1]) == KEY, "ours come first"
    assert key_in_common([KEY], [ids[1], b"", b"x"]) is None
    assert key_in_common([], ids) is None
