"""Numbers in bodies, with their bounds: what decoders refuse, and what the schema says of them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

EXACT_MAX = 2**53 - 1
"""The largest integer that every JSON reader keeps exact; the database keeps it, too."""

Count = Annotated[int, Meta(ge=0, le=EXACT_MAX)]
"""How many, or which one, from 0."""
AtLeastOne = Annotated[int, Meta(ge=1, le=EXACT_MAX)]
