"""Labels of a version: what its publisher says of it, kept with it, and returned to whoever reads it.

`VersionLabels` is the table of them. A row is a keyword argument of every form of publish, an option of `paramserver
push`, an entry of `SealedVersion.labels`, and a label that `paramserver versions` and `paramserver status` show. The
annotation of a row holds its type (str, int, float or bool), its bound, and its help.

On their way, in messages and in the registry, labels are one map of texts by name, and no relay acts on them. What a
relay acts on is an option of its own (`protos.announce_options`). A relay of a release before labels keeps none.

Invariants:
- the zero of a label's type is the same as no label, and does not travel;
- a version has only labels that fit the table and the bounds below: who publishes checks it, and so does the relay;
- a name that only a newer release knows is kept by relays within the bounds, and returned to readers as a text;
- what a newer release allows of a label is no error for an older reader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypedDict, cast, get_type_hints

import msgspec

from protos.errors import InvalidRequest
from protos.telemetry.context import TRACEPARENT_CHARS_MAX

LABELS_MAX = 16
"""Of one version. All of them stand in each message that names the version."""
LABEL_CHARS_MAX = 1024
"""Of one label as a text."""


class VersionLabels(TypedDict, total=False):
    """The labels that a publisher may give. All have values where a version is read."""

    note: Annotated[str, msgspec.Meta(max_length=256), "Kept with the version: a text of at most 256 characters."]
    traceparent: Annotated[
        str,
        msgspec.Meta(max_length=TRACEPARENT_CHARS_MAX),
        "W3C trace context that the version's trace continues. Default: that of the caller's span, if it traces by "
        "OpenTelemetry; else the master relay may begin a trace.",
    ]


_ROWS = get_type_hints(VersionLabels, include_extras=True)
_TYPES = get_type_hints(VersionLabels)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def given_labels(options: Mapping[str, Any]) -> dict[str, str]:
    """The labels among the options of a publish, as they travel. Raises InvalidRequest."""
    given = {name: _checked(name, options[name], strict=True) for name in _ROWS if name in options}
    labels = {name: str(value) for name, value in given.items() if value}
    check_labels(labels)
    return labels


def check_labels(labels: Mapping[str, str]) -> None:
    """InvalidRequest for labels, as they travel, that no version may have."""
    if len(labels) > LABELS_MAX:
        raise InvalidRequest(f"{len(labels)} labels of one version", hint=f"at most {LABELS_MAX}")
    for name, text in labels.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:200]!r} cannot name a label", hint="up to 64 of a-z, 0-9 and '_', a letter first"
            )
        if name in _ROWS:
            _checked(name, text, strict=False)
        _check_text(name, text)


def read_labels(labels: Mapping[str, str]) -> VersionLabels:
    """Labels as they travelled, each in its type: all of the table, and after them those of a newer release."""
    found: dict[str, Any] = {name: kind() for name, kind in _TYPES.items()}
    for name, text in labels.items():
        found[name] = _read(text, _TYPES.get(name, str))
    return cast(VersionLabels, found)


def _checked(name: str, value: Any, *, strict: bool) -> Any:
    """The value of a row of the table; not `strict`: of its text."""
    try:
        return msgspec.convert(value, _ROWS[name], strict=strict)
    except msgspec.ValidationError as error:
        is_text = isinstance(value, str) and _TYPES[name] is str  # so it is too long, and not worth repeating
        what = f"has {len(value)} characters" if is_text else f"is {value!r:.100}"
        raise InvalidRequest(f"{name} {what}", hint=str(error).replace("Expected", "expected")) from error


def _check_text(name: str, text: str) -> None:
    if len(text) > LABEL_CHARS_MAX:
        raise InvalidRequest(f"{name} has {len(text)} characters", hint=f"at most {LABEL_CHARS_MAX}")
    if found := _CONTROL.search(text):  # it is shown in tables and by terminals
        raise InvalidRequest(f"{name} holds {found[0]!r}", hint="give one line of text, without control characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a Python string may hold half a surrogate pair
        raise InvalidRequest(f"{name} is {text!r}, which is not valid Unicode", hint="leave out surrogates") from error


def _read(text: str, kind: Any) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:  # a relay that did not know the name let it through
        return kind()
