"""Where the gateways that share a log are reached, and which engines and names of sessions are whose. Pure.

Invariants:
- a claim of another gateway is never replaced: it ends by time, or its gateway drops it. A life drops only its own: a
  gateway that started again meanwhile has taken it over;
- a session's name is the gateway's, whichever its life; an engine is that life's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway.core.commands import Effect

FORGET_S = 604_800.0
"""After which a gateway that has not shown itself is forgotten."""

Kind = Literal["engine", "session"]


class ShowGateway(msgspec.Struct, frozen=True, tag=True):
    """`url` empty: it is not reached yet."""

    gateway: str
    url: str


class ClaimNames(msgspec.Struct, frozen=True, tag=True):
    """The answer: those that another one holds, with its gateway and life."""

    kind: Kind
    names: Sequence[str]
    gateway: str
    life: str
    lasts_s: float


class DropClaims(msgspec.Struct, frozen=True, tag=True):
    kind: Kind
    names: Sequence[str]
    gateway: str
    life: str


Command = ShowGateway | ClaimNames | DropClaims


class Claim(msgspec.Struct, frozen=True):
    gateway: str
    life: str
    until: float


class ClaimState(msgspec.Struct):
    """`urls`, `seen`: by gateway. `held`: by kind and name, in the order of their renewals."""

    urls: dict[str, str] = {}
    seen: dict[str, float] = {}
    held: dict[Kind, dict[str, Claim]] = {}

    def holder(self, kind: Kind, name: str, now: float) -> Claim | None:
        found = self.held.get(kind, {}).get(name)
        return found if found is not None and found.until > now else None

    def carry_out(self, command: Command, now: float) -> Effect:
        match command:
            case ShowGateway(gateway, url):
                self._show(gateway, url, now)
                return Effect(None)
            case ClaimNames(kind, names):
                found = {name: holder for name in names if (holder := self._claim(kind, name, command, now))}
                self._forget(kind, now)
                return Effect(found)
            case DropClaims(kind, names, gateway, life):
                claims = self.held.get(kind, {})
                for name in names:
                    claim = claims.get(name)
                    if claim is not None and (claim.gateway, claim.life) == (gateway, life):
                        del claims[name]
                return Effect(None)

    def _show(self, gateway: str, url: str, now: float) -> None:
        if url:
            self.urls[gateway] = url
        self.seen[gateway] = now
        for gone in [name for name, seen in self.seen.items() if seen < now - FORGET_S]:
            del self.seen[gone]
            self.urls.pop(gone, None)

    def _claim(self, kind: Kind, name: str, wanted: ClaimNames, now: float) -> Claim | None:
        found, held = self.holder(kind, name, now), self.held.setdefault(kind, {})
        if found is not None and (found.gateway != wanted.gateway or (kind == "engine" and found.life != wanted.life)):
            return found
        held.pop(name, None)
        held[name] = Claim(wanted.gateway, wanted.life, now + wanted.lasts_s)
        return None

    def _forget(self, kind: Kind, now: float) -> None:
        """Claims of a kind last alike, so those that are over stand first."""
        held = self.held[kind]
        while held and held[first := next(iter(held))].until <= now:
            del held[first]
