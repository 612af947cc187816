"""Which registry versions come from, and whether another one may go on with their numbers."""

from __future__ import annotations

from paramserver.core.lineage import Lineage, Origin

FIRST, OTHER = Origin("first"), Origin("other")


def seen() -> Lineage:
    lineage = Lineage()
    assert lineage.saw(FIRST, 27)
    assert not lineage.saw(FIRST, 27)
    return lineage


def test_who_has_seen_nothing_believes_any_registry() -> None:
    assert Lineage().refuses(OTHER, 1) == ""


def test_another_registry_is_refused_however_high_its_numbers_are() -> None:
    for number in (1, 27, 28, 1000):
        why = "the registry was replaced: it is other, and versions up to 27 are of first"
        assert seen().refuses(OTHER, number) == why
    assert "adopt --relay HOST:PORT --continues first --model policy --above 27" in seen().remedy("policy")


def test_a_registry_that_goes_on_with_the_one_before_is_believed() -> None:
    lineage, adopted = seen(), Origin.of("other", ["first", "zero"])
    assert lineage.refuses(adopted, 1027) == ""
    assert lineage.saw(adopted, 1027)
    assert lineage.refuses(FIRST) != "", "there is no way back"


def test_a_registry_that_does_not_say_which_it_is_is_believed() -> None:
    """Relays from before ids were told."""
    assert seen().refuses(Origin()) == ""


def test_a_number_is_new_unless_it_was_sealed() -> None:
    """One that was never sealed may be given again by the next master."""
    lineage = seen()
    assert lineage.refuses(FIRST, 27) == ""
    lineage.sealed = 27
    assert lineage.refuses(FIRST, 27) == "the registry went back: it gives number 27, and version 27 was sealed"
    assert lineage.refuses(FIRST, 28) == ""
