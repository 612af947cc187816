"""What the HTTP server uses of aiohttp that is none of its interface: a release that renames one of these fails here.

The doors of a gateway stand below aiohttp's handlers: they hold back a request before it is read, and bound connections
and heads, for which aiohttp has no hooks.
"""

from __future__ import annotations

import ast
import inspect

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from gateway.api import http_server

OF_CONNECTION = {"_current_request", "_messages", "_reading_paused", "_request_count"}
"""Of a `RequestHandler`; `_buffer_paused`, which came with 3.14, is read where it is there."""
OF_SERVER = {"_kwargs", "_loop"}
OF_RUNNER = {"_make_server"}
OWN = {"_admission", "_body", "_head_due", "_held", "_refusal", "_rounds", "_silence_due"}


def read_of_self(kind: type) -> set[str]:
    """The private names that the methods of the class read or set of themselves, and do not define."""
    [tree] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return {name for name in found - defined if name.startswith("_") and not name.startswith("__")}


async def test_a_connection_uses_these_and_they_are_there() -> None:
    assert read_of_self(http_server._Connection) - OWN == OF_CONNECTION
    found = RequestHandler(web.Server(lambda request: web.Response()), loop=None)  # type: ignore[arg-type]
    for name in OF_CONNECTION:
        assert hasattr(found, name), name
    assert (found._current_request, len(found._messages), found._request_count) == (None, 0, 0)
    assert found._reading_paused is False


async def test_a_server_and_its_runner_use_these_and_they_are_there() -> None:
    assert read_of_self(http_server._Server) - OWN == OF_SERVER
    server = web.Server(lambda request: web.Response())
    assert server._loop is not None
    assert isinstance(server._kwargs, dict)
    assert inspect.iscoroutinefunction(web.AppRunner._make_server)
    assert "super()._make_server()" in inspect.getsource(http_server.Runner)
