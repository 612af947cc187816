"""The live sessions of this gateway, their keys, and the names of those that have ended.

Sessions that wait for their reward are live, and so are calls without a session while they run.

Owner of every `SessionState`; everything runs on one event loop, without locks. Invariants:
- a name is used once: neither a live session's nor an ended one's (of the last `ENDED_MAX`) is given again;
- a session is in the store before any turn of it.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

from gateway.config import GatewayConfig
from gateway.core.access import ATTACH, CALL, Caller, Target, finish_key, owner_of, require
from gateway.core.endings import Ended
from gateway.core.fleet.events import SessionEnded, SessionMade
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.modes import mode_of
from gateway.core.key_bounds import KeyBounds
from gateway.core.presence import Presence
from gateway.core.sessions import SESSION_NAME_HINT, SessionSpec, SessionState, names_a_session
from gateway.core.types import GroupId, SessionId, TurnId
from gateway.log.gateways import SharedGateways, of_group
from gateway.ports import SESSION_KEY_PREFIX, SessionIdentity
from gateway.runtime.clock import unix_s
from gateway.sessions.known_groups import KnownGroups
from gateway.store import Timeline
from gateway.store.sessions import ENDED_MAX, SessionStore
from protos.errors import Conflict, InvalidRequest, NotFound, OutOfCapacity, Unavailable, UnsupportedField
from protos.telemetry.spans import Tracer


class UnknownSession(NotFound):
    """No session of this name is, or was, at this gateway."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"no session {session_id!r}", hint="make it with POST /sessions")
        self.session_id = session_id


def _check_name(name: str) -> None:
    if not names_a_session(name):
        raise InvalidRequest(f"{name[:40]!r} is not a session id", hint=SESSION_NAME_HINT)


class SessionRegistry:
    """`gateways`: those that share a store with this one, if there may be any."""

    def __init__(
        self,
        config: GatewayConfig,
        machine: FleetMachine,
        store: SessionStore,
        timeline: Timeline,
        groups: KnownGroups,
        tracer: Tracer | None = None,
        gateways: SharedGateways | None = None,
    ) -> None:
        self.tracer = tracer
        self._gateways = gateways
        self.draining = False  # the gateway shuts down: nothing new begins
        self._config, self._machine, self._store, self._timeline = config, machine, store, timeline
        self._groups = groups
        self._live: dict[SessionId, SessionState] = {}
        self._keys: dict[str, SessionId] = {}
        self._key_of: dict[SessionId, str] = {}
        self._ended: OrderedDict[SessionId, Ended] = OrderedDict()
        self._children: dict[SessionId, set[SessionId]] = {}  # of live sessions, by their parent
        self.bounds = KeyBounds(config.sessions_per_key, config.turns_per_key)
        self.presence = Presence(config.idle_after_s, self._live.get, machine.state.training)
        self._unnamed: dict[SessionId, SessionState] = {}  # of the live ones, those of calls that named none
        self.training: dict[str, set[SessionId]] = {}  # live sessions for training, by their group

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[SessionState]:
        return iter(self._live.values())

    def unnamed(self) -> Collection[SessionState]:
        """Sessions of calls that named none."""
        return self._unnamed.values()

    def find(self, session_id: SessionId) -> SessionState | None:
        return self._live.get(session_id)

    def of_turn(self, turn_id: TurnId) -> SessionState | None:
        """The session in whose tree this turn is. It takes about 0.1 us a live session."""
        return next((state for state in self._live.values() if turn_id in state.tree), None)

    def of_key(self, api_key: str) -> SessionId | None:
        return self._keys.get(api_key)

    def ended(self, session_id: SessionId) -> Ended | None:
        return self._ended.get(session_id)

    def revise_ended(self, session_id: SessionId, ended: Ended) -> None:
        """Other rewards are recorded of a session that has ended."""
        if session_id in self._ended:
            self._ended[session_id] = ended

    def owner(self, session_id: SessionId) -> str | None:
        """The name whose API key made the session, also of one that has ended; None for an unknown session."""
        state = self._live.get(session_id)
        if state is not None:
            return state.spec.owner
        ended = self._ended.get(session_id)
        return None if ended is None else ended.owner

    def finish_key(self, session_id: SessionId) -> str:
        """The key that ends the session, with or without a reward."""
        return finish_key(self._store.finish_secret, session_id)

    def get(self, session_id: SessionId) -> SessionState:
        """Raises Conflict for a session that has ended, NotFound for an unknown one."""
        state = self._live.get(session_id)
        if state is not None:
            return state
        if session_id in self._ended:
            raise Conflict(
                f"session {session_id} is already {self._ended[session_id]}",
                hint="an ended session takes no calls; POST /sessions/ID/reward changes the reward of a finished one",
            )
        raise UnknownSession(session_id)

    def children(self, session_id: SessionId) -> list[SessionState]:
        """Its children that have not ended."""
        if session_id not in self._children:
            return []
        found = (self._live[name] for name in sorted(self._children[session_id]))
        return [child for child in found if child.phase == "live"]

    def blocked(self, session_id: SessionId) -> bool:
        """The session waits for a child."""
        return any(child.spec.blocks_parent for child in self.children(session_id))

    def parent_ended(self, spec: SessionSpec) -> bool:
        parent = spec.parent_session_id
        if parent is None or (state := self._live.get(parent)) is None:
            return parent in self._ended
        return state.unrewarded is not None

    def unblock(self, state: SessionState) -> None:
        """The session has ended: no engine is held for it, and a parent that waited for it is idle from now on."""
        self._machine.handle(SessionEnded(state), time.monotonic())
        parent = None if state.spec.parent_session_id is None else self._live.get(state.spec.parent_session_id)
        if parent is not None and state.spec.blocks_parent:
            parent.touched_unix_s = now = unix_s()
            self.presence.woke(parent, now)

    def new_id(self) -> SessionId:
        """An id for a session. Where gateways share a store, it says whose it is."""
        mark = "" if self._gateways is None else f"{self._gateways.mark}-"
        return SessionId(f"s-{mark}{secrets.token_hex(8)}")

    def reserved(self, name: SessionId | None) -> AbstractAsyncContextManager[None]:
        """Around the making of a session of a name that a client chose, where gateways share a store. Misdirected for
        one of another gateway's."""
        if self._gateways is None or name is None or self._is_here(name):
            return nullcontext()
        _check_name(name)
        return self._gateways.reserved(name, lambda: self._is_here(name))

    def reserved_group(self, group_id: GroupId) -> AbstractAsyncContextManager[None]:
        """The same of a group."""
        if self._gateways is None:
            return nullcontext()
        return self._gateways.reserved(of_group(group_id), lambda: self._groups.find(group_id) is not None)

    def _is_here(self, name: SessionId) -> bool:
        return name in self._live or name in self._ended

    def owner_for(self, identity: SessionIdentity) -> str:
        """The name whose key made the session that a request names, or makes it with this request."""
        known = None if identity.session_id is None else self.owner(identity.session_id)
        return owner_of(identity.caller) if known is None else known

    def named_by(self, identity: SessionIdentity) -> SessionState:
        """The session that a request names. A new name, or none, makes a session, which is the caller's. Forbidden for
        another's: checked here, because a session of that name may have been made while the request came in."""
        owner = owner_of(identity.caller)
        if identity.session_id is None:
            name = SessionId(f"call-{secrets.token_hex(8)}")
            kept = identity.kept
            spec = SessionSpec(
                name, GroupId(name), ephemeral=not kept, unnamed=kept, train=False, owner=owner, trace=identity.trace
            )
            return self.create(spec)[0]
        if (known := self.owner(identity.session_id)) is None:
            spec = SessionSpec(identity.session_id, GroupId(identity.session_id), owner=owner, trace=identity.trace)
            self.check_rights(spec, identity.caller)
            return self.create(spec)[0]
        require(CALL, identity.caller, Target(identity.session_id, known))
        return self.get(identity.session_id)

    def check_rights(self, spec: SessionSpec, caller: Caller | None) -> None:
        """Forbidden where the session would stand below a parent that is not the caller's, which it could keep from
        being idle, or in such a group, whose members a trainer compares."""
        parent = spec.parent_session_id
        if parent is not None and (owner := self.owner(parent)) is not None:
            require(ATTACH, caller, Target(parent, owner))
        if (owner := self._groups.owner(spec.group_id)) is not None:
            require(ATTACH, caller, Target(None, owner))

    def create(self, spec: SessionSpec) -> tuple[SessionState, str]:
        """Makes a session and its API key. Conflict for a name in use, OutOfCapacity beyond `sessions_max`, and beyond
        what the holder of the caller's key may have.

        It is on disk once `saved` returns, and before any turn of it.
        """
        self._check(spec)
        if self.tracer is not None and spec.trace is None:
            spec = replace(spec, trace=self.tracer.begin())
        now = unix_s()
        state = self._enter(SessionState(spec, now, now, version=spec.version))
        self._note_parent(spec)
        self._machine.handle(SessionMade(state), time.monotonic())
        key = f"{SESSION_KEY_PREFIX}{secrets.token_hex(12)}"
        if not spec.ephemeral:
            self._note_key(spec.session_id, key)
            self._store.add(spec, key, now)
            self._timeline.add(
                "session", session_id=spec.session_id, group_id=spec.group_id, state="started", **environment(spec)
            )
        return state, key

    def _check(self, spec: SessionSpec) -> None:
        _check_name(spec.session_id)
        self._check_parent(spec)
        self._store.check()
        if self.draining:
            raise Unavailable("the gateway is shutting down", hint="send the request again soon")
        if self._is_here(spec.session_id):
            how = f" ({self._ended[spec.session_id]})" if spec.session_id in self._ended else ""
            raise Conflict(
                f"there was already a session {spec.session_id!r}{how}; trajectories carry its name: it is used once",
                hint="leave session_id out to get a new one",
            )
        insists = spec.version is not None or spec.max_version is not None or spec.on_version_loss != "segment"
        if mode_of(self._config.fleet).mixes and insists:
            raise UnsupportedField(
                f"session {spec.session_id} insists on its version, or on none newer than `max_version`, and mode "
                "`inflight` changes it under running turns",
                hint="leave `version`, `max_version` and `on_version_loss` out, or run the gateway with --mode repack",
            )
        if spec.version is not None and not self._machine.state.pinned.room_for(spec.version):
            raise OutOfCapacity(
                f"session {spec.session_id} insists on version {spec.version}: {self._machine.state.pinned.full}",
                hint="end some of them, or start the gateway with a higher --pinned-versions-max",
                retry_after_s=5.0,
            )
        if len(self._live) >= self._config.sessions_max:
            raise OutOfCapacity(
                f"{len(self._live)} sessions are live", hint="finish or abandon some", retry_after_s=5.0
            )
        self.bounds.check_session(spec.owner)

    def _check_parent(self, spec: SessionSpec) -> None:
        parent = spec.parent_session_id
        if parent is None:
            return
        state = self._live.get(parent)
        if self.parent_ended(spec):
            raise Conflict(
                f"{parent!r} has ended, and can be no parent of {spec.session_id}", hint="name a live session"
            )
        if state is None or state.spec.ephemeral:
            raise NotFound(
                f"no session {parent!r} to be the parent of {spec.session_id}", hint="make it first with POST /sessions"
            )

    async def saved(self) -> None:
        """Returns when every session made so far is on disk."""
        await self._store.written()

    def restore(self, spec: SessionSpec, api_key: str = "", created_unix_s: float | None = None) -> SessionState:
        """A session of an earlier life of the gateway; its turns are restored after it."""
        now = unix_s()
        state = SessionState(spec, now if created_unix_s is None else created_unix_s, now, version=spec.version)
        if not spec.ephemeral:
            self._enter(state)
            self._machine.handle(SessionMade(state), time.monotonic())
            self._note_parent(spec)
            self._note_key(spec.session_id, api_key)
        return state

    def _note_parent(self, spec: SessionSpec) -> None:
        if spec.parent_session_id is not None:
            self._children.setdefault(spec.parent_session_id, set()).add(spec.session_id)
            if (parent := self._live.get(spec.parent_session_id)) is not None:
                self.presence.look_again(parent, unix_s())

    def _note_key(self, session_id: SessionId, key: str) -> None:
        self._keys[key], self._key_of[session_id] = session_id, key

    def restore_ended(self, ended: Iterable[tuple[SessionId, Ended]]) -> None:
        self._ended.update(ended)

    def revive(self, state: SessionState) -> None:
        """A call without a session whose turn a retry continues."""
        self._enter(state)

    def _enter(self, state: SessionState) -> SessionState:
        if state.session_id not in self._live:
            self.bounds.session_began(state.spec.owner)
            self.presence.note(state)
            if state.spec.unnamed:
                self._unnamed[state.session_id] = state
            if state.spec.trains:
                self.training.setdefault(state.spec.group_id, set()).add(state.session_id)
        self._live[state.session_id] = state
        return state

    def forget(self, state: SessionState, ended: Ended | None = None) -> None:
        """Takes the session out of the live ones; how it ended is remembered."""
        if ended is not None:
            self._ended[state.session_id] = ended
            while len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)
        if self._live.pop(state.session_id, None) is not None:
            self.bounds.session_ended(state.spec.owner)
            self._unnamed.pop(state.session_id, None)
            if state.spec.trains:
                members = self.training[group := state.spec.group_id]
                members.discard(state.session_id)
                if not members:
                    del self.training[group]
        parent = state.spec.parent_session_id
        if parent in self._children:
            self._children[parent].discard(state.session_id)
            if not self._children[parent]:
                del self._children[parent]
        self.presence.gone(state, unix_s())
        self._machine.handle(SessionEnded(state, forgotten=True), time.monotonic())
        key = self._key_of.pop(state.session_id, None)
        if key is not None:
            del self._keys[key]


def environment(spec: SessionSpec) -> Mapping[str, str]:
    """The tag of a session that the timeline shows."""
    return {"environment": spec.tags["environment"]} if "environment" in spec.tags else {}
