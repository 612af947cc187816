"""Labels of a version: what a publisher may give, what a relay keeps, and what readers of other releases get."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from paramserver.client import VersionOptions
from paramserver.client.announced import announcement
from paramserver.core.layout import TensorSpec
from protos import version_labels
from protos.errors import InvalidRequest
from protos.laminar.v1 import relay_pb2 as pb
from protos.version_labels import (
    LABEL_CHARS_MAX,
    LABELS_MAX,
    VersionLabels,
    check_labels,
    given_labels,
    read_labels,
)
from trainer_client.streaming.arguments import PublishArguments, PublishOptions


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with labels that are no texts."""
    rows = {"tokens": Annotated[int, msgspec.Meta(ge=0), "Seen."], "loss": Annotated[float, "Mean."]}
    rows["warm"] = Annotated[bool, "Warmed up."]
    monkeypatch.setattr(version_labels, "_ROWS", rows)
    monkeypatch.setattr(version_labels, "_TYPES", {"tokens": int, "loss": float, "warm": bool})


def test_a_row_has_help_and_a_type_whose_zero_is_no_label() -> None:
    for name, row in version_labels._ROWS.items():
        assert version_labels._TYPES[name] in (str, int, float, bool), name
        assert any(isinstance(note, str) for note in row.__metadata__), f"{name} has help"
        assert {name} <= VersionOptions.__annotations__.keys() & PublishOptions.__annotations__.keys()


def test_a_label_goes_into_the_announcement_and_its_zero_does_not() -> None:
    specs = [TensorSpec("w", "U8", (1,))]
    arguments = PublishArguments.of({"note": "lower rate"}, "copied")
    announced, _ = announcement("policy", specs, run="r", step=1, **arguments.announce)
    assert dict(announced.labels) == {"note": "lower rate"}
    for none in ({}, {"note": ""}):
        announced, _ = announcement("policy", specs, run="r", step=1, **none)  # type: ignore[typeddict-item]
        assert not announced.labels


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ("x" * 257, "note has 257 characters (expected `str` of length <= 256)"),
        (3, "note is 3 (expected `str`, got `int`)"),
        (None, "note is None (expected `str`, got `null`)"),
        ("two\nlines", r"note holds '\n' (give one line of text, without control characters)"),
        ("\x1b[31mred", r"note holds '\x1b' (give one line of text, without control characters)"),
        ("\ud800", r"note is '\ud800', which is not valid Unicode (leave out surrogates)"),
    ],
)
def test_what_is_no_label_is_refused_by_name(note: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        given_labels({"note": note, "step": 1})
    assert str(refused.value) == words


def test_the_longest_note_is_taken() -> None:
    note = "é" * 256
    assert read_labels(given_labels({"note": note}))["note"] == note


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"note": "x" * 257}, "note has 257 characters"),
        ({"of_tomorrow": "x" * (LABEL_CHARS_MAX + 1)}, f"of_tomorrow has 1025 characters .at most {LABEL_CHARS_MAX}"),
        ({"of_tomorrow": "a\tb"}, "of_tomorrow holds"),
        ({f"l{n}": "" for n in range(LABELS_MAX + 1)}, f"17 labels of one version .at most {LABELS_MAX}"),
        *(({name: "x"}, "cannot name a label") for name in ("", "A", "1", "a b", "a" * 65, "é")),
    ],
)
def test_a_relay_bounds_labels_that_it_does_not_know(labels: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_labels(labels)


def test_a_relay_keeps_labels_of_a_newer_release_and_readers_get_them_as_texts() -> None:
    labels = {"of_tomorrow": "7", "note": "n"}
    check_labels(labels)
    found = list(read_labels(labels).items())
    assert ("note", "n") in found
    assert found[-1] == ("of_tomorrow", "7"), "after those that have a row"


def test_a_reader_takes_what_a_newer_release_allows() -> None:
    assert read_labels({"note": "x" * 1000})["note"] == "x" * 1000


def test_without_labels_readers_have_the_zeros() -> None:
    found = read_labels({})
    assert found.keys() == VersionLabels.__annotations__.keys()
    assert not any(found.values())


@pytest.mark.usefixtures("numbers")
def test_numbers_come_back_as_they_went() -> None:
    given = {"tokens": 1 << 60, "loss": 0.1, "warm": True}
    labels = given_labels(given)
    assert all(isinstance(text, str) for text in pb.SealedVersion(labels=labels).labels.values())
    assert read_labels(labels) == given
    assert given_labels({"tokens": 0, "loss": 0.0, "warm": False}) == {}
    assert read_labels({}) == {"tokens": 0, "loss": 0.0, "warm": False}
    assert read_labels({"tokens": "many"})["tokens"] == 0, "of a relay that did not know the name"  # type: ignore[typeddict-item]
    for wrong in ({"tokens": "many"}, {"tokens": "-1"}):
        with pytest.raises(InvalidRequest, match=r"tokens is '(many|-1)' .expected `int`"):
            check_labels(wrong)
    with pytest.raises(InvalidRequest, match=r"tokens is -1 .expected `int` >= 0"):
        given_labels({"tokens": -1})
