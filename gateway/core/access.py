"""Who may do what over HTTP: the one table of operations, and what it decides. Pure.

Every route names its operation (`gateway.api.routes`), one middleware enforces it (`gateway.api.access`), and
docs/reference/roles.md shows the table.

Invariants:
- what no operation allows is refused;
- who acts does not reward: a session's own key makes its calls and reads it, its finish key ends it. Neither does the
  other's work, unless the gateway runs with `--agents-may-reward`, and neither reaches another session;
- an agent reaches only sessions and groups that a key of its name has made. One that nobody's key made, because access
  control was off, is trainers' and admins' alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass

from gateway.core.types import SessionId
from protos.access.roles import FINISH_KEY_PREFIX, ROLES, ApiKey, Role
from protos.errors import Forbidden

NOBODY = ""
"""The owner of a session that was made while access control was off."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`roles` may do it. `own`: roles that may do it to sessions and groups of their own name alone. `session_key`,
    `finish_key`: whether that key may do it, to its own session. `public`: no key is needed."""

    name: str
    what: str
    roles: frozenset[Role] = frozenset()
    own: frozenset[Role] = frozenset()
    session_key: bool = False
    finish_key: bool = False
    public: bool = False

    @property
    def needs(self) -> str:
        """The roles that may do it, in words."""
        return " or ".join(role for role in ROLES if role in self.roles | self.own)


def _operation(name: str, what: str, *roles: Role, own: tuple[Role, ...] = (), **keys: bool) -> Operation:
    return Operation(name, what, frozenset(roles), frozenset(own), **keys)


LOOK = _operation("look", "health, the schema of the API, and the dashboard's page without its data", public=True)
STATUS = _operation(
    "status", "status, metrics, the timeline, live sessions, plans and receipts", "admin", "trainer", "reader"
)
OPERATE = _operation("operate", "add and remove engines, repack now, end idle sessions", "admin")
MODELS = _operation(
    "models", "the models served", "admin", "trainer", "agent", "reader", session_key=True, finish_key=True
)
CALL = _operation(
    "call", "model calls; a new name makes a session", "admin", "trainer", own=("agent",), session_key=True
)
OPEN = _operation("open", "make sessions and groups", "admin", "trainer", "agent")
ATTACH = _operation(
    "attach", "make a session below a parent, or in a group that was made as one", "admin", "trainer", own=("agent",)
)
READ = _operation(
    "read",
    "a session as it stands, its trajectories and responses",
    *("admin", "trainer", "reader"),
    own=("agent",),
    session_key=True,
    finish_key=True,
)
END = _operation("end", "finish, reward and abandon a session", "admin", "trainer", own=("agent",), finish_key=True)
GROUP = _operation("group", "a group, with the keys of its sessions; abandon it", "admin", "trainer", own=("agent",))
LEASE = _operation("lease", "lease tasks, and say what came of them", "admin", "trainer", "agent")
TASKS_READ = _operation("tasks read", "a prompt pool and its results", "admin", "trainer", "agent", "reader")
TASKS = _operation("tasks", "add, remove and prioritise tasks", "admin", "trainer")
EXPERIENCE_READ = _operation(
    "experience read", "finished trajectories under no lease, and statistics", "admin", "trainer", "reader"
)
EXPERIENCE = _operation("experience", "lease, use up and evict finished trajectories", "admin", "trainer")
OPERATIONS = (
    *(LOOK, STATUS, OPERATE, MODELS, CALL, OPEN, ATTACH, READ, END, GROUP),
    *(LEASE, TASKS_READ, TASKS, EXPERIENCE_READ, EXPERIENCE),
)


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The caller has the key with which that session's calls are made."""

    session_id: SessionId


@dataclass(frozen=True, slots=True)
class FinishKey:
    """The caller has the key that ends that session."""

    session_id: SessionId


Caller = ApiKey | SessionKey | FinishKey


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is about. `session_id` None: a group. `owner`: the name whose key made it."""

    session_id: SessionId | None
    owner: str = NOBODY


def owner_of(caller: Caller | None) -> str:
    """Who owns what this caller makes. None: access control is off."""
    return caller.name if isinstance(caller, ApiKey) else NOBODY


def require(
    operation: Operation, caller: Caller | None, target: Target | None = None, *, agents_may_reward: bool = False
) -> None:
    """Raises Forbidden, with what would be allowed, where `refusal` has a reason. `caller` None: access control is
    off."""
    if caller is None:
        return
    if reason := refusal(operation, caller, target, agents_may_reward=agents_may_reward):
        raise Forbidden(reason, hint=_hint(operation))


def refusal(operation: Operation, caller: Caller, target: Target | None, *, agents_may_reward: bool = False) -> str:
    """Why the caller may not do this to `target`; "" if it may. Without a target: to any at all."""
    if operation.public:
        return ""
    if isinstance(caller, ApiKey):
        return _refusal_of_role(operation, caller, target)
    own, may = "its own key", operation.session_key or (operation.finish_key and agents_may_reward)
    if isinstance(caller, FinishKey):
        own, may = "a finish key", operation.finish_key
    if not may:
        return f"{own} does not allow this to a session: {operation.what}"
    if target is not None and target.session_id != caller.session_id:
        return "this key belongs to another session"
    return ""


def _refusal_of_role(operation: Operation, caller: ApiKey, target: Target | None) -> str:
    if caller.role in operation.roles:
        return ""
    if caller.role not in operation.own:
        return f"the key of {caller.name} has the role {caller.role}, which does not allow: {operation.what}"
    if target is None or (target.owner == caller.name and target.owner != NOBODY):
        return ""
    what = "group" if target.session_id is None else "session"
    return f"the {what} was not made with a key of {caller.name}"


def _hint(operation: Operation) -> str:
    keys = f"this needs a key with the role {operation.needs}"
    if operation.own:
        keys += " (an agent's: of the name that made it)"
    others = [name for name, may in (("own key", operation.session_key), ("finish key", operation.finish_key)) if may]
    return f"{keys}, or the session's {' or '.join(others)}" if others else keys


def finish_key(secret: bytes, session_id: SessionId) -> str:
    """The key that ends the session of this name: made of a secret of the gateway, so that it need not be stored for
    each session, and is the same after a restart. Names are used once."""
    mac = hmac.digest(secret, session_id.encode(errors="surrogatepass"), hashlib.sha256)
    return FINISH_KEY_PREFIX + base64.urlsafe_b64encode(mac[:24]).decode()
