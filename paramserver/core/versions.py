"""The life of a model's versions as one relay sees it: events in, effects out.

Invariants:
- a version is shown (may be acquired) only when it is sealed, complete here, and its root equals the sealed one;
- a local stage only moves along `TRANSITIONS`; an event that does not apply changes nothing;
- one version at a time is fetched, the oldest wanted first; one that a newer sealed version has overtaken before
  its first byte is skipped, unless the fleet wants a copy of it here: such copies come last;
- what was skipped or retired is wanted again once all that was newer is lost;
- retiring never touches a version that is pinned, or one of the newest `retain` shown here;
- the next number is above every number ever seen, and above those that others may have seen (`skip_to`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from paramserver.core.records import Announced, Ended, Epoch, Manifest, Plan, Sealed

Stage = Literal["known", "filling", "complete", "shown", "skipped", "retired", "ended"]

TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    "known": frozenset({"filling", "skipped", "ended"}),
    "filling": frozenset({"complete", "known", "ended"}),
    "complete": frozenset({"shown", "known", "ended"}),
    "shown": frozenset({"retired", "known", "ended"}),
    "skipped": frozenset({"known", "ended"}),
    "retired": frozenset({"known", "ended"}),
    "ended": frozenset(),
}
"""known: announced or sealed somewhere; filling: bytes arrive; complete: every chunk verified, seal not seen;
shown: sealed and complete; skipped: overtaken before its first byte; retired: its memory went back;
ended: aborted or lost."""


@dataclass(slots=True)
class VersionState:
    """One version here. `root` is what this relay computed from its own verified digests."""

    announced: Announced | None = None
    sealed: Sealed | None = None
    ended: Ended | None = None
    stage: Stage = "known"
    root: str | None = None
    holders: set[str] = field(default_factory=set)
    spilled: set[str] = field(default_factory=set)  # relays that can read it back from disk
    copied: bool = False  # the fleet wants a copy here, though newer versions are sealed


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start to bring this version here. `copy`: for the fleet, from complete holders, if there is room to spare."""

    announced: Announced
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Show:
    """It may be acquired from now on; the registry should know this relay as a holder."""

    sealed: Sealed


@dataclass(frozen=True, slots=True)
class Drop:
    """Give its memory back (after the reuse check)."""

    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Notify:
    """An event for the watches of this relay."""

    kind: Literal["sealed", "available", "retired", "lost"]
    sealed: Sealed


@dataclass(frozen=True, slots=True)
class GoneBack:
    """Versions that a registry does not have any more, since it was restored from a backup.

    `lost`: newer than all it has; they count again. `apart`: the registry has gone on without them, so that they would
    go back to other weights. `twice`: numbers that it gave again.
    """

    lost: tuple[tuple[Manifest, Sealed], ...]
    apart: tuple[int, ...]
    twice: tuple[int, ...]


Effect = Fetch | Show | Drop | Notify


class ModelVersions:
    """All versions of one model on one relay. The owner calls one method per event and applies the effects."""

    def __init__(self, model: str, *, retain: int) -> None:
        if retain < 1:
            raise ValueError(f"retain is {retain}; a relay keeps at least 1 version")
        self.model = model
        self.retain = retain
        self._versions: dict[int, VersionState] = {}
        self._skip_to = 0
        self.revision = 0  # grows with every change
        self._newest: tuple[int, int | None] = (-1, None)  # the newest sealed, as of a revision

    def get(self, version: int) -> VersionState | None:
        return self._versions.get(version)

    def items(self) -> list[tuple[int, VersionState]]:
        return sorted(self._versions.items())

    @property
    def newest_known(self) -> int:
        """The highest number ever seen; 0 when none was."""
        return max(self._versions, default=0)

    @property
    def next_number(self) -> int:
        """The number that a master may give to its next version."""
        return max(self.newest_known + 1, self._skip_to)

    def skip_to(self, number: int) -> None:
        """Numbers below may be in use in a registry that cannot be read any more."""
        self._skip_to = max(self._skip_to, number)

    @property
    def newest_sealed(self) -> int | None:
        revision, newest = self._newest
        if revision != self.revision:
            newest = max((v for v, s in self._versions.items() if s.sealed and not s.ended), default=None)
            self._newest = (self.revision, newest)
        return newest

    @property
    def settled(self) -> bool:
        """Whether nothing comes or goes before the next event: no reconciling is needed until `revision` changes."""
        stages = [state.stage for state in self._versions.values() if state.stage != "known" or state.announced]
        return stages.count("shown") <= self.retain and not {"known", "filling", "complete"} & set(stages)

    def shown(self) -> list[Sealed]:
        """The versions that may be acquired here, ascending."""
        return [state.sealed for _, state in self.items() if state.stage == "shown" and state.sealed]

    # ---- events from the registry

    def announced(self, record: Announced) -> list[Effect]:
        """The registry's version of that number. One that only this relay announced makes way.

        A master that lost its election before its announcement was written has opened a version here under a number
        that the next master has given again: another epoch, other bytes. Its holders are those of the registry's
        version.
        """
        state = self._state(record.manifest.version)
        mine, state.announced = state.announced, record
        if mine is None or mine.manifest.epoch == record.manifest.epoch:
            return []
        here = state.stage in ("filling", "complete", "shown")
        self._versions[record.manifest.version] = VersionState(
            announced=record, holders=state.holders, spilled=state.spilled
        )
        lost: list[Effect] = [Notify("lost", state.sealed)] if state.stage == "shown" and state.sealed else []
        dropped = Drop(record.manifest.version, "another master gave its number to another version")
        return [dropped, *lost] if here else []

    def sealed(self, record: Sealed) -> list[Effect]:
        state = self._state(record.version)
        if state.sealed is not None or state.ended is not None:
            return []
        state.sealed = record
        return [Notify("sealed", record), *self._show(record.version)]

    def ended(self, version: int, record: Ended) -> list[Effect]:
        state = self._state(version)
        if state.ended is not None:
            return []
        here = state.stage in ("filling", "complete", "shown")
        state.ended = record
        if state.stage != "ended":  # its bytes here may have turned out bad before
            self._move(state, "ended")
        effects: list[Effect] = [Drop(version, f"{record.why}: {record.reason}")] if here else []
        if state.sealed is not None:
            effects.append(Notify("lost", state.sealed))
        return effects

    def holder(self, version: int, relay: str, *, present: bool) -> None:
        """Another relay (or this one) is known to hold the version, or no longer is."""
        state = self._state(version) if present else self._versions.get(version)
        if state is not None:
            (state.holders.add if present else state.holders.discard)(relay)

    def spilled(self, version: int, relay: str, *, present: bool) -> None:
        """A relay has the version on disk, or no longer does."""
        state = self._state(version) if present else self._versions.get(version)
        if state is not None:
            (state.spilled.add if present else state.spilled.discard)(relay)

    def dropped(self, below: int) -> list[Effect]:
        """An operator ended all versions below this number: nothing of them is kept or known any more."""
        effects: list[Effect] = []
        for version, state in self.items():
            if version >= below:
                continue
            if state.stage in ("filling", "complete", "shown"):
                effects.append(Drop(version, "its model was dropped"))
            if state.stage == "shown" and state.sealed:
                effects.append(Notify("lost", state.sealed))
            del self._versions[version]
        self.revision += 1
        self.skip_to(below)
        return effects

    @property
    def empty(self) -> bool:
        """Whether no version is known."""
        return not self._versions

    # ---- events from this relay

    def opened(self, announced: Announced) -> None:
        """Bytes begin to arrive: from a publisher, or after a Fetch."""
        state = self._state(announced.manifest.version)
        state.announced = announced
        self._move(state, "filling")

    def filled(self, version: int, root: str) -> list[Effect]:
        """Every chunk is here and verified."""
        state = self._state(version)
        if state.stage != "filling":  # it ended while the last bytes were looked at
            return []
        state.root = root
        self._move(state, "complete")
        return self._show(version)

    def gave_up(self, version: int) -> None:
        """The bytes could not be had, or nobody needs them any more; `next_fetch` decides what follows."""
        self._move(self._state(version), "known")

    def withdrawn(self, version: int, reason: str) -> list[Effect]:
        """This relay's own bytes of a version turned out bad; a sealed one may be had again, elsewhere or from disk."""
        state = self._state(version)
        if state.stage not in ("filling", "complete", "shown"):
            return []
        lost: list[Effect] = [Notify("lost", state.sealed)] if state.stage == "shown" and state.sealed else []
        self._move(state, "known" if state.sealed else "ended")
        return [Drop(version, reason), *lost]

    def retire(self, pins: Mapping[int, int]) -> list[Effect]:
        """Versions beyond the newest `retain` shown that nobody pins (`pins`: version to number of pins)."""
        effects: list[Effect] = []
        for record in self.shown()[: -self.retain]:
            if pins.get(record.version, 0) == 0:
                self._move(self._versions[record.version], "retired")
                effects += [Drop(record.version, "retention"), Notify("retired", record)]
        return effects

    def copy_here(self, versions: Collection[int]) -> None:
        """Marks the versions that the fleet wants copies of here, and no others."""
        for version, state in self.items():
            state.copied = version in versions and self.overtaken(version)
            if state.copied and state.stage in ("skipped", "retired"):
                self._move(state, "known")

    def forgettable(self, keep: int, pinned: Collection[int] = ()) -> list[int]:
        """All but the newest `keep` numbers, as far as nothing of them is left here.

        `pinned`: for the fleet, by whom a copy may be wanted.
        """
        if len(self._versions) <= keep:
            return []
        gone = ("known", "skipped", "retired", "ended")
        return [v for v, state in self.items()[:-keep] if state.stage in gone and v not in pinned]

    def forget(self, versions: Collection[int]) -> None:
        """Forgets those, of `forgettable`."""
        for version in versions:
            self._versions.pop(version, None)

    # ---- decisions

    def next_fetch(self) -> list[Effect]:
        """The fetch that is due. To be called after a whole batch of events: the first of them alone may mislead."""
        if any(state.stage == "filling" for state in self._versions.values()):
            return []
        copies: list[Effect] = []
        for version, state in self.items():
            if state.stage in ("skipped", "retired") and not self.overtaken(version):
                self._move(state, "known")
            if state.stage != "known" or state.announced is None:
                continue
            if not self.overtaken(version):
                return [Fetch(state.announced)]
            if state.copied:
                copies.append(Fetch(_outside_the_chain(state.announced), copy=True))
            else:
                self._move(state, "skipped")
        return copies[:1]

    def overtaken(self, version: int) -> bool:
        """Whether a newer version is sealed."""
        newest = self.newest_sealed
        return newest is not None and newest > version

    def gone_back(self, left: Sequence[tuple[Manifest, Sealed]], store_id: str) -> GoneBack:
        """What the registry `store_id`, whose records are all that is known here, lacks of versions sealed earlier.

        A registry forgets a sealed version only when it is dropped, or long past. So one that is newer than all its
        sealed ones shows that it was restored from a backup. It has gone on since then if it gave a number again, or
        has a version of a later master than such a one; numbers and election revisions show that, clocks do not.
        Where a later master got the lower revision, since revisions went back as well, a number given again shows it.
        """

        def rank(epoch: Epoch) -> tuple[bool, int]:
            return epoch.store_id == store_id, epoch.revision  # stores that were continued come before

        newest = self.newest_sealed or 0
        live = {v: s.announced.manifest for v, s in self._versions.items() if s.announced and not s.ended}
        twice = [of.version for of, _ in left if live.get(of.version, of) != of]
        lost = [
            (of, sealed)
            for of, sealed in left
            if of.version > newest and of.version not in twice and not self._has_ended(of.version)
        ]
        latest = max((rank(of.epoch) for of in live.values()), default=(False, 0))
        if twice or any(rank(of.epoch) < latest for of, _ in lost):
            return GoneBack((), tuple(of.version for of, _ in lost if of.version not in self._versions), tuple(twice))
        return GoneBack(tuple(lost), (), ())

    def _has_ended(self, version: int) -> bool:
        state = self._versions.get(version)
        return state is not None and state.ended is not None

    def _state(self, version: int) -> VersionState:
        self.revision += 1  # callers change the state
        return self._versions.setdefault(version, VersionState())

    def _move(self, state: VersionState, stage: Stage) -> None:
        assert stage in TRANSITIONS[state.stage], f"{self.model}: {state.stage} -> {stage}"
        self.revision += 1
        state.stage = stage

    def _show(self, version: int) -> list[Effect]:
        state = self._versions[version]
        if state.stage != "complete" or state.sealed is None:
            return []
        if state.root != state.sealed.root_digest:
            state.ended = Ended("lost", f"root {state.root} here, {state.sealed.root_digest} sealed")
            self._move(state, "ended")
            return [Drop(version, state.ended.reason)]
        self._move(state, "shown")
        return [Show(state.sealed), Notify("available", state.sealed)]


def _outside_the_chain(announced: Announced) -> Announced:
    """The announcement without its chain, which is long done: complete holders serve it as to a late joiner."""
    return msgspec.structs.replace(announced, plan=Plan(announced.manifest.epoch, 0, ()))
