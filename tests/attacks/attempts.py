"""The attempts: who sends what. Bodies are sent as JSON; a `raw` attempt is the bytes of a whole request.

`{alice}` and such in a raw one is that holder's header; `SIZE_MAX` is the largest body that the gateway takes.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.keys import CALL

SIZE_MAX = 1 << 20
FINISH = {"reward": 1.0}


@dataclass(frozen=True, slots=True)
class Attempt:
    """`who`: a holder of a key, "mine acts" and "mine finishes" for the keys of alice's session, or a key as it is.
    `admin`: at the admin listener. `keeps_open`: the client sends no more, and waits."""

    what: str
    who: str = ""
    method: str = "GET"
    path: str = "/status"
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    admin: bool = False


def engine(url: str, **more: Any) -> dict[str, Any]:
    return {"name": "evil", "url": url, "check": False, **more}


def nested(depth: int) -> bytes:
    return b'{"model": "policy", "prompt": ' + b"[" * depth + b"]" * depth + b"}"


def post(path: bytes, body: bytes, *headers: bytes, length: bool = True) -> bytes:
    sized = (b"Content-Length: %d" % len(body),) if length else ()
    head = (b"POST %s HTTP/1.1" % path, b"Host: x", b"{alice}", b"Content-Type: application/json", *sized, *headers)
    return b"\r\n".join((*head, b"", body))


def get(path: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((b"GET %s HTTP/1.1" % path, b"Host: x", *headers, b"", b""))


BROKEN_PIECES = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"1\r\n{\r\n" * 20_000
    + b"zz\r\n"
)
NOBODY = (
    Attempt("look at the status without a key"),
    Attempt("call a model without a key", method="POST", path="/v1/chat/completions", body={}),
    Attempt("look for a route without a key", path="/secret"),
    Attempt("send a key that nobody has", "x" * 24),
    Attempt("send an administrator's key without its last character", "admin-cut"),
    Attempt("send a key in the query", path="/status?api_key={admin}"),
    Attempt("send a key by `Proxy-Authorization`", headers={"Proxy-Authorization": "{admin}"}),
    Attempt(
        "say that the request came from this host", headers={"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=::1"}
    ),
    Attempt(
        "name another method in a header, where GET needs no key: it counts for nothing",
        method="GET",
        path="/healthz",
        headers={"X-HTTP-Method-Override": "POST"},
    ),
)
ANOTHERS = (
    Attempt("finish another's session with a reward", "bob", "POST", "/sessions/mine/finish", FINISH),
    Attempt("the same by its other path", "bob", "POST", "/finish_session?session_id=mine", FINISH),
    Attempt("change its reward", "bob", "POST", "/sessions/mine/reward", {"reward": 9.0}),
    Attempt("abandon it", "bob", "POST", "/sessions/mine/abandon"),
    Attempt("read its trajectories", "bob", "GET", "/sessions/mine/trajectories"),
    Attempt("call a model in it", "bob", "POST", "/sessions/mine/v1/completions", CALL),
    Attempt("the same, named by the body", "bob", "POST", "/v1/completions", {**CALL, "session_id": "mine"}),
    Attempt("the same, named by a header", "bob", "POST", "/v1/completions", CALL, {"X-Session-ID": "mine"}),
    Attempt("make a session below it", "bob", "POST", "/sessions", {"parent_session_id": "mine"}),
    Attempt("join another's group", "bob", "POST", "/sessions", {"group_id": "g"}),
    Attempt("read the keys of another's group", "bob", "GET", "/groups/g"),
)
OWN_KEYS = (
    Attempt("reward itself", "mine acts", "POST", "/sessions/mine/finish", FINISH),
    Attempt("abandon itself, to be sampled again", "mine acts", "POST", "/sessions/mine/abandon"),
    Attempt("act in another session", "mine acts", "POST", "/sessions/theirs/v1/completions", CALL),
    Attempt("make a session", "mine acts", "POST", "/sessions", {}),
    Attempt("look at the fleet", "mine acts"),
    Attempt("call a model with the finish key", "mine finishes", "POST", "/sessions/mine/v1/completions", CALL),
    Attempt("finish another session with it", "mine finishes", "POST", "/sessions/theirs/finish", FINISH),
)
ROLES = (
    Attempt("add an engine", "alice", "POST", "/admin/engines", engine("http://127.0.0.1:1")),
    Attempt("remove an engine", "alice", "DELETE", "/admin/engines/e0"),
    Attempt("look at other sessions", "alice", "GET", "/admin/sessions"),
    Attempt("lease experience", "alice", "POST", "/experience/sample", {"reader": "x"}),
    Attempt("evict experience", "alice", "POST", "/experience/evict", {"session_ids": ["mine"]}),
    Attempt("remove tasks", "alice", "POST", "/tasks/remove", {"drained": True}),
    Attempt("repack, with a trainer's key", "trainer", "POST", "/admin/repack"),
    Attempt("make a session, with a reader's key", "reader", "POST", "/sessions", {}),
    Attempt("add an engine on the clients' port, with an administrator's key", "admin", "POST", "/admin/engines", {}),
    Attempt(
        "remove an engine at the admin listener, with an agent's key",
        "alice",
        "DELETE",
        "/admin/engines/e0",
        admin=True,
    ),
    Attempt("call a model at the admin listener", "admin", "POST", "/v1/completions", CALL, admin=True),
)
PATHS = (
    Attempt("make a session named `../../admin`", "alice", "POST", "/sessions", {"session_id": "../../admin"}),
    Attempt("one named `..`", "alice", "POST", "/sessions", {"session_id": ".."}),
    Attempt("one with a line break in its name", "alice", "POST", "/sessions", {"session_id": "a\nERROR"}),
    Attempt("one with an escape sequence in its name", "alice", "POST", "/sessions", {"session_id": "\x1b[2J"}),
    Attempt("one whose name turns the text around", "alice", "POST", "/sessions", {"session_id": "a\u202eb"}),
    Attempt("one with a name of a megabyte", "alice", "POST", "/sessions", {"session_id": "x" * 500_000}),
    Attempt("reach a route by `/sessions/..%2Fstatus`", "alice", "GET", "/sessions/..%2Fstatus"),
    Attempt("by `/sessions/%2e%2e/status`", raw=get(b"/sessions/%2e%2e/status", b"{alice}")),
    Attempt("by `/sessions/mine/../../status`", raw=get(b"/sessions/mine/../../status", b"{alice}")),
    Attempt("by `//status`", raw=get(b"//status", b"{alice}")),
    Attempt("by `/STATUS`", raw=get(b"/STATUS", b"{alice}")),
    Attempt("by `/status/`", raw=get(b"/status/", b"{alice}")),
    Attempt("by `/status;x`", raw=get(b"/status;x", b"{alice}")),
    Attempt("by `/status%00`", raw=get(b"/status%00", b"{alice}")),
    Attempt("by `/healthz/..%2Fstatus`, without a key", raw=get(b"/healthz/..%2Fstatus")),
    Attempt("by `http://elsewhere/status`, without a key", raw=get(b"http://elsewhere/status")),
    Attempt("a path as a group", "alice", "GET", "/groups/..%2Fg"),
    Attempt("a path as a model", "alice", "GET", "/v1/models/..%2F..%2Fetc%2Fpasswd"),
    Attempt("a path as a response", "alice", "GET", "/v1/responses/..%2F..%2Fstatus"),
    Attempt("a path as a lease of a task", "alice", "POST", "/tasks/finish", {"lease_id": "../../x", "reward": 1.0}),
    Attempt("a path as a reader", "trainer", "POST", "/experience/ack", {"lease_id": "../../x"}),
    Attempt("a path as an engine", "admin", "DELETE", "/admin/engines/..%2F..%2Fe0", admin=True),
    Attempt(
        "an engine with an escape sequence in its name",
        *("admin", "POST", "/admin/engines", engine("http://127.0.0.1:1", name="\x1b[2J/x")),
        admin=True,
    ),
)


def _ssrf(what: str, url: str, **more: Any) -> Attempt:
    return Attempt(what, "admin", "POST", "/admin/engines", engine(url, **more), admin=True)


SSRF = (
    _ssrf("a cloud's credentials, `http://169.254.169.254`", "http://169.254.169.254"),
    _ssrf("the same as a number, `http://2852039166`", "http://2852039166"),
    _ssrf("the same by IPv6, `http://[::ffff:169.254.169.254]`", "http://[::ffff:169.254.169.254]"),
    _ssrf("the same as a relay", "http://127.0.0.1:1", relay="169.254.169.254:80"),
    _ssrf("every address, `http://0.0.0.0:8080`", "http://0.0.0.0:8080"),
    _ssrf("a host of the internet, `http://8.8.8.8`", "http://8.8.8.8"),
    _ssrf("a file, `file:///etc/passwd`", "file:///etc/passwd"),
    _ssrf("another scheme, `gopher://127.0.0.1:6379`", "gopher://127.0.0.1:6379"),
    _ssrf("behind a user, `http://e0@169.254.169.254`", "http://e0@169.254.169.254"),
    _ssrf("with a query, `http://127.0.0.1/?x=`", "http://127.0.0.1/?x="),
)
SIZES = (
    Attempt("a header of 100 kB", raw=get(b"/status", b"X: " + b"x" * 100_000)),
    Attempt("5,000 headers", raw=get(b"/status", *(b"X-%d: y" % n for n in range(5000)))),
    Attempt("a path of 100 kB", raw=get(b"/" + b"x" * 100_000)),
    Attempt("a head that is never whole", raw=b"GET /status HTTP/1.1\r\nHost: x\r\nX: "),
    Attempt("a body that is never whole", raw=post(b"/v1/completions", b"{", b"Content-Length: 1000", length=False)),
    Attempt("a body that is too large", raw=post(b"/v1/completions", b" " * (SIZE_MAX + 1))),
    Attempt(
        "a body said to be of an exabyte",
        raw=post(b"/v1/completions", b"{", b"Content-Length: " + b"9" * 18, length=False),
    ),
    Attempt(
        "a body of 20 kB that is 20 MB unpacked",
        raw=post(b"/v1/completions", gzip.compress(b" " * 20_000_000, mtime=0), b"Content-Encoding: gzip"),
    ),
    Attempt("a body nested 100,000 deep", raw=post(b"/v1/completions", nested(100_000))),
    Attempt("two lengths", raw=post(b"/v1/completions", b"{}", b"Content-Length: 5")),
    Attempt(
        "a length and pieces (request smuggling)",
        raw=post(b"/v1/completions", b"0\r\n\r\n", b"Transfer-Encoding: chunked"),
    ),
    Attempt(
        "a piece that is none behind many, without a key",
        raw=BROKEN_PIECES,
    ),
    Attempt(
        "pieces that are none", raw=post(b"/v1/completions", b"zz\r\n", b"Transfer-Encoding: chunked", length=False)
    ),
    Attempt("a negative length", raw=post(b"/v1/completions", b"", b"Content-Length: -1", length=False)),
    Attempt("a header over two lines", raw=get(b"/status", b"X: a\r\n b")),
    Attempt("what is no HTTP", raw=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    Attempt("129 choices of one call", "alice", "POST", "/v1/completions", {**CALL, "n": 129}),
    Attempt(
        "a number that is none",
        raw=post(b"/v1/completions", b'{"model": "policy", "prompt": [5], "max_tokens": 1e999}'),
    ),
)
GROUPS: Mapping[str, tuple[Attempt, ...]] = {
    "Without a key, or with a wrong one": NOBODY,
    "Another's session, with an agent's key": ANOTHERS,
    "A session's own keys": OWN_KEYS,
    "Roles": ROLES,
    "Names and paths": PATHS,
    "An engine of the attacker's, with an administrator's key": SSRF,
    "Slow, oversized and broken requests": SIZES,
}
