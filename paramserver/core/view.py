"""One relay's view of the tier: the registry's keys, built and parsed here alone.

Invariants:
- every key of the registry is built and read in this module only;
- without the registry the last view stays: it is used, not trusted for new decisions of the master;
- a key that cannot be read costs itself alone: it is listed in `unreadable`, and what was known before stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from paramserver.core.chain import Place
from paramserver.core.records import (
    Announced,
    Ended,
    Epoch,
    FleetPin,
    Holding,
    Manifest,
    Master,
    Member,
    Plan,
    Sealed,
    check_model_name,
)
from protos.decoding import decode_json

ROOT = "/laminar/"
STORE = ROOT + "store"
_MEMBERS = ROOT + "members/"
_MODELS = ROOT + "models/"
_HOLDERS = ROOT + "holders/"
_SPILLED = ROOT + "spilled/"
_PINS = ROOT + "pins/"
_DROPPED = ROOT + "dropped/"
_CONTINUES = ROOT + "continues/"
ENGINES = ROOT + "engines/"
"""Written by relays, read by gateways: no relay needs to know of another's engines."""
CLAIMS = ROOT + "claims/"
"""Written and read by gateways alone: which engines are whose."""


def member_key(name: str) -> str:
    return _MEMBERS + name


def store_mark(store_id: str) -> str:
    """A guard on this key holds in that store only, whatever the revisions of another have come to."""
    return f"{STORE}/{store_id}"


def continues_key(store_id: str) -> str:
    """The versions of that earlier store go on in this one: an operator adopted it."""
    return _CONTINUES + store_id


def wanted_key(model: str) -> str:
    """Exists as long as the model does, so that relays know to elect a master for it."""
    return f"{_MODELS}{model}/wanted"


def master_key(model: str) -> str:
    return f"{_MODELS}{model}/master"


def plan_key(model: str) -> str:
    return f"{_MODELS}{model}/plan"


def skipped_key(model: str, relay: str) -> str:
    """The first number that a master may give, written by a relay that may have missed those below."""
    return f"{_MODELS}{model}/skipped/{relay}"


def version_key(model: str, version: int, what: Literal["announced", "sealed", "ended"]) -> str:
    return f"{_MODELS}{model}/versions/{version:016d}/{what}"


def holder_key(model: str, version: int, relay: str) -> str:
    return f"{_HOLDERS}{model}/{version:016d}/{relay}"


def spilled_key(model: str, version: int, relay: str) -> str:
    """A relay can read the version back from its disk, though it may not hold it in memory."""
    return f"{_SPILLED}{model}/{version:016d}/{relay}"


def pin_key(model: str, version: int, lease_id: str) -> str:
    """On a lease of its own: it outlives the relay that wrote it, for its holder has to pin elsewhere first."""
    return f"{_PINS}{model}/{version:016d}/{lease_id}"


def dropped_key(model: str) -> str:
    """The first number that an operator did not drop. It outlives the model: its numbers are never given again."""
    return _DROPPED + model


def engine_key(name: str) -> str:
    return ENGINES + name


def is_own_copy(key: str, relay: str) -> bool:
    """Whether the key says that this relay has a version, in memory or on its disk."""
    return key.startswith((_HOLDERS, _SPILLED)) and key.endswith(f"/{relay}")


def is_spilled(key: str) -> bool:
    return key.startswith(_SPILLED)


Record = Announced | Sealed | Ended
_RECORDS: dict[str, type[Announced] | type[Sealed] | type[Ended]] = {
    "announced": Announced,
    "sealed": Sealed,
    "ended": Ended,
}


@dataclass(frozen=True, slots=True)
class MasterSeen:
    """The master of a model and the revision of its election."""

    master: Master
    revision: int


@dataclass(frozen=True, slots=True)
class VersionFact:
    """A version's record was written."""

    model: str
    version: int
    record: Record


@dataclass(frozen=True, slots=True)
class HolderFact:
    """A relay came to hold a version, or no longer does."""

    model: str
    version: int
    relay: str
    present: bool
    holding: Holding | None = None


@dataclass(frozen=True, slots=True)
class SpilledFact:
    """A live relay has a version on disk, or no longer does."""

    model: str
    version: int
    relay: str
    present: bool


@dataclass(frozen=True, slots=True)
class SkippedFact:
    """Numbers below this one are not given again: another registry may have had them."""

    model: str
    number: int


@dataclass(frozen=True, slots=True)
class DroppedFact:
    """An operator dropped all versions below this number."""

    model: str
    number: int


@dataclass(frozen=True, slots=True)
class MasterFact:
    """A model's master changed (None: there is none)."""

    model: str
    seen: MasterSeen | None


@dataclass(frozen=True, slots=True)
class MemberFact:
    """A relay came or went."""

    name: str
    member: Member | None


Fact = VersionFact | HolderFact | SpilledFact | SkippedFact | DroppedFact | MasterFact | MemberFact


@dataclass
class View:
    """Owned by the relay's follower task."""

    store_id: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    masters: dict[str, MasterSeen] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    pins: dict[tuple[str, int], dict[str, FleetPin]] = field(default_factory=dict)  # for the fleet; by lease id
    continues: set[str] = field(default_factory=set)  # ids of earlier stores whose versions go on in this one
    unreadable: dict[str, str] = field(default_factory=dict)  # why, by key
    dropped: dict[str, int] = field(default_factory=dict)  # by model: the first number that was not
    _raw: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    _num_keys: Counter[str] = field(default_factory=Counter)  # of each model

    def places(self) -> dict[str, Place]:
        """Every live relay that stays, and where it is."""
        return {name: Place(member.zone, member.rack) for name, member in self.members.items() if not member.draining}

    def pinned(self, model: str, version: int) -> dict[str, int]:
        """Copies that the fleet is to keep, by the relay that has the pin."""
        copies: dict[str, int] = {}
        for pin in self.pins.get((model, version), {}).values():
            copies[pin.relay] = max(pin.copies, copies.get(pin.relay, 0))
        return copies

    def pinned_versions(self, model: str) -> list[int]:
        """The versions that the fleet is to keep, for any pin."""
        return sorted(version for of, version in self.pins if of == model)

    def knows(self, key: str) -> bool:
        """Whether the registry has the key, as far as this relay has seen."""
        return key in self._raw

    def has_announced(self, manifest: Manifest) -> bool:
        """Whether the registry has the announcement of this very version, as far as this relay has seen."""
        key = version_key(manifest.model, manifest.version, "announced")
        if key not in self._raw or key in self.unreadable:
            return False
        return decode_json(self._raw[key][0], Announced).manifest == manifest

    def without_master(self) -> dict[str, str]:
        """Why, by model, no relay can become its master: a key that cannot be read stands where the master's would."""
        return {
            model: f"its key {master_key(model)} in the registry is no master's record "
            f"({self.unreadable[master_key(model)][:200]}): delete it, unless a newer relay wrote it"
            for model in sorted(self.models - self.masters.keys())
            if master_key(model) in self.unreadable
        }

    def created(self, key: str) -> int | None:
        """The revision at which the key came to be; None when this relay knows no such key."""
        found = self._raw.get(key)
        return found[1] if found is not None else None

    def keys_of(self, model: str) -> list[str]:
        """All keys below a model's name."""
        return sorted(key for key in self._raw if key.startswith(f"{_MODELS}{model}/"))

    def give_plan(self, model: str, plan: Plan) -> None:
        """Takes the plan of this relay as master; the registry has it with the next announcement."""
        self.plans[model] = plan

    def epoch(self, model: str) -> Epoch | None:
        seen = self.masters.get(model)
        return Epoch(self.store_id, seen.revision) if seen is not None else None

    def replace(self, entries: list[tuple[str, bytes, int]]) -> list[Fact]:
        """The whole state of the registry, as facts that differ from what was known."""
        new = {key for key, _, _ in entries}
        facts: list[Fact] = []
        for key in sorted(self._raw.keys() - new):
            facts += self.remove(key)
        for key, value, created in entries:
            facts += self.put(key, value, created)
        return facts

    def put(self, key: str, value: bytes, created: int) -> list[Fact]:
        if self._raw.get(key) == (value, created):
            return []
        if key not in self._raw and key.startswith(_MODELS):
            self._num_keys[_model_of(key)] += 1
        self._raw[key] = (value, created)
        try:
            facts = list(self._parse_put(key, value, created))
        except Exception as error:  # noqa: BLE001  (anybody may write to a registry, and a newer relay writes more)
            self.unreadable[key] = f"{type(error).__name__}: {error}"
            return []
        self.unreadable.pop(key, None)
        return facts

    def remove(self, key: str) -> list[Fact]:
        if self._raw.pop(key, None) is None:
            return []
        was_unreadable = self.unreadable.pop(key, None) is not None
        try:
            facts = list(self._parse_remove(key))
            self._forget_key(key)
            return facts
        except Exception:
            if was_unreadable:
                return []
            raise

    def _forget_key(self, key: str) -> None:
        if key.startswith(_MODELS):
            model = _model_of(key)
            self._num_keys[model] -= 1
            if not self._num_keys[model]:
                del self._num_keys[model]

    def keyless(self) -> set[str]:
        """Models of which the registry knows nothing any more; they stay known here until forgotten."""
        return self.models - self._num_keys.keys()

    def forget(self, model: str) -> None:
        """Forgets a keyless model."""
        self.models.discard(model)
        self.plans.pop(model, None)

    def _parse_put(self, key: str, value: bytes, created: int) -> Iterator[Fact]:
        if key == STORE:
            self.store_id = value.decode()
        elif key.startswith(_CONTINUES):
            self.continues.add(key.removeprefix(_CONTINUES))
        elif key.startswith(_MEMBERS):
            member = decode_json(value, Member)
            _demand(member.name == key.removeprefix(_MEMBERS), f"it is of {member.name!r}")
            self.members[member.name] = member
            yield MemberFact(member.name, member)
        elif key.startswith(_HOLDERS):
            model, version, relay = key.removeprefix(_HOLDERS).split("/")
            yield HolderFact(model, int(version), relay, present=True, holding=_holding(value))
        elif key.startswith(_SPILLED):
            model, version, relay = key.removeprefix(_SPILLED).split("/")
            yield SpilledFact(model, int(version), relay, present=True)
        elif key.startswith(_PINS):
            model, version, lease_id = key.removeprefix(_PINS).split("/")
            self.pins.setdefault((model, int(version)), {})[lease_id] = decode_json(value, FleetPin)
        elif key.startswith(_DROPPED):
            model, number = check_model_name(key.removeprefix(_DROPPED)), int(value)
            self.dropped[model] = number
            yield DroppedFact(model, number)
        elif key.startswith(_MODELS):
            model, *rest = key.removeprefix(_MODELS).split("/")
            yield from self._parse_model(check_model_name(model), rest, value, created)
            self.models.add(model)

    def _parse_model(self, model: str, rest: list[str], value: bytes, created: int) -> Iterator[Fact]:
        match rest:
            case ["master"]:
                seen = MasterSeen(decode_json(value, Master), created)
                self.masters[model] = seen
                yield MasterFact(model, seen)
            case ["plan"]:
                self.plans[model] = decode_json(value, Plan)
            case ["skipped", _]:
                yield SkippedFact(model, int(value))
            case ["versions", version, what] if what in _RECORDS:
                record = decode_json(value, _RECORDS[what])
                _check_record(model, int(version), record)
                yield VersionFact(model, int(version), record)

    def _parse_remove(self, key: str) -> Iterator[Fact]:
        if key.startswith(_CONTINUES):
            self.continues.discard(key.removeprefix(_CONTINUES))
        elif key.startswith(_MEMBERS):
            name = key.removeprefix(_MEMBERS)
            self.members.pop(name, None)
            yield MemberFact(name, None)
        elif key.startswith(_HOLDERS):
            model, version, relay = key.removeprefix(_HOLDERS).split("/")
            yield HolderFact(model, int(version), relay, present=False)
        elif key.startswith(_SPILLED):
            model, version, relay = key.removeprefix(_SPILLED).split("/")
            yield SpilledFact(model, int(version), relay, present=False)
        elif key.startswith(_PINS):
            model, version, lease_id = key.removeprefix(_PINS).split("/")
            of = self.pins.get((model, int(version)), {})
            of.pop(lease_id, None)
            if not of:
                self.pins.pop((model, int(version)), None)
        elif key.startswith(_DROPPED):
            self.dropped.pop(key.removeprefix(_DROPPED), None)
        elif key.startswith(_MODELS) and key.endswith("/master"):
            model = key.removeprefix(_MODELS).split("/")[0]
            self.masters.pop(model, None)
            yield MasterFact(model, None)


def _model_of(key: str) -> str:
    return key.removeprefix(_MODELS).partition("/")[0]


def _holding(value: bytes) -> Holding:
    return decode_json(value, Holding) if value else Holding()


def _check_record(model: str, version: int, record: Record) -> None:
    """ValueError when a version's record is not of the version that its key names, or names bytes that cannot be."""
    match record:
        case Announced(manifest, plan):
            _demand(
                (manifest.model, manifest.version) == (model, version), f"it is of {manifest.model} {manifest.version}"
            )
            _demand(manifest.chunk_bytes > 0, f"its chunks are of {manifest.chunk_bytes} bytes")
            _demand(all(file.size_bytes >= 0 for file in manifest.files), "a file is of less than no bytes")
            _demand(plan.number >= 0, f"its plan is number {plan.number}")
        case Sealed():
            _demand((record.model, record.version) == (model, version), f"it is of {record.model} {record.version}")
            _demand(record.size_bytes >= 0, f"it is of {record.size_bytes} bytes")
    _demand(version > 0, "versions are positive")


def _demand(right: bool, otherwise: str) -> None:
    if not right:
        raise ValueError(otherwise)
