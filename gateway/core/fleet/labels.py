"""What an engine's label of its weights says of their version. Pure."""

from __future__ import annotations

from gateway.core.types import NO_VERSION, Version

VERSION_DIGITS_MAX = 18
"""Of a version: a longer number fits no store, and no relay assigns it."""
UNNAMED = ("", "default")
"""Labels of weights that nobody named."""
FOREIGN = Version(-1)
"""Of weights that no relay gave an engine, and that it was not started with."""


def is_version(label: str) -> bool:
    return label.isascii() and label.isdigit() and len(label) <= VERSION_DIGITS_MAX


def version_of(label: str, started_with: str | None = None) -> Version:
    """The version in an engine's label. Any other label is that of the weights it was started with; where these are
    known by the label `started_with`, which may be "", another one is FOREIGN."""
    if is_version(label):
        return Version(int(label))
    if started_with is None or label == started_with or (not started_with and label in UNNAMED):
        return NO_VERSION
    return FOREIGN
