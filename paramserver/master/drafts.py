"""Versions on their way to their seal, on the master that numbered them.

Invariants:
- a draft moves from writing to committed to sealed, or fails; one that failed keeps its reason for good;
- only the holder of its token may write to it;
- the newest VERSIONS_KEPT of each model are kept, for tickets that are queried late.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Literal

from paramserver.core.records import Announced, Manifest
from paramserver.memory.store import Snapshot
from paramserver.relay.models import VERSIONS_KEPT, ModelTable
from protos.errors import Conflict

DraftState = Literal["writing", "committed", "sealed", "failed"]


@dataclass
class Draft:
    """A version on its way to its seal, on its master."""

    announced: Announced
    snapshot: Snapshot
    token: str
    announced_unix_s: float = field(default_factory=time.time)
    owners: tuple[int, ...] = (0,)  # per file: the rank that writes it
    num_ranks: int = 1
    committed: set[int] = field(default_factory=set)
    recording: asyncio.Task[None] | None = None  # the first try to announce it in the registry
    recorded: bool = False
    in_doubt: bool = False  # a sealing transaction was sent and not answered
    warnings: tuple[str, ...] = ()  # for its publisher
    state: DraftState = "writing"
    reason: str = ""
    root: str = ""

    @property
    def manifest(self) -> Manifest:
        return self.announced.manifest


class Drafts:
    """Owned by the relay's event loop."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._drafts: dict[tuple[str, int], Draft] = {}

    def add(self, draft: Draft) -> None:
        model = draft.manifest.model
        self._drafts[model, draft.manifest.version] = draft
        mine = sorted(version for m, version in self._drafts if m == model)
        for version in mine[:-VERSIONS_KEPT]:
            del self._drafts[model, version]

    def get(self, model: str, version: int) -> Draft | None:
        """The draft of that number; None also when it was given to another version meanwhile."""
        draft = self._drafts.get((model, version))
        return draft if draft is not None and self.is_current(draft) else None

    def is_current(self, draft: Draft) -> bool:
        """Whether the number is still this draft's: one never recorded may be given again by another master."""
        state = self._models.of(draft.manifest.model).get(draft.manifest.version)
        of = state.announced.manifest.epoch if state is not None and state.announced is not None else None
        return of is None or of == draft.manifest.epoch

    def of(self, model: str, version: int, token: str) -> Draft:
        """Conflict when nobody may write to that version with this token."""
        draft = self._drafts.get((model, version))
        if draft is None or not secrets.compare_digest(draft.token.encode(), token.encode(errors="replace")):
            raise Conflict(f"nothing may be written to version {version} of {model} with this token")
        return draft

    def writable(self, model: str, version: int, token: str) -> Snapshot:
        """The snapshot that the token permits to write. Conflict; any thread may call it."""
        draft = self.of(model, version, token)
        if draft.state != "writing":
            raise Conflict(f"version {version} of {model} is {draft.state}: {draft.reason or 'no more writing'}")
        return draft.snapshot

    def writing(self, model: str) -> list[Draft]:
        return [d for (m, _), d in sorted(self._drafts.items()) if m == model and d.state == "writing"]

    def busy(self, model: str) -> bool:
        """Whether a version is being written or sealed."""
        return any(m == model and d.state in ("writing", "committed") for (m, _), d in self._drafts.items())

    def num_in_doubt(self) -> int:
        """Versions whose sealing transaction was sent and not yet answered."""
        return sum(draft.state == "committed" and draft.in_doubt for draft in self._drafts.values())

    def __len__(self) -> int:
        return len(self._drafts)
