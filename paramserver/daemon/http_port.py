"""The relay's HTTP port, for metrics and health: it costs the relay little whoever calls.

With credentials it speaks TLS to those who begin with it, and takes certificates of the fleet alone; what comes in the
clear is served as well, and the application sees which it was (`wsgi.url_scheme`).

Invariants:
- at most CONNECTIONS_MAX are open, each with a thread; the oldest makes way for the next one, so that those which say
  nothing keep no probe out;
- one that is silent for SILENCE_S is closed;
- a connection that breaks is no line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

from paramserver.data.server import Admission
from protos.access.tls import FleetTls

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
"""An honest one takes milliseconds, and there are few of them: probes, and Prometheus."""
SILENCE_S = 5.0
"""Also for a whole handshake."""
_TLS_HANDSHAKE = b"\x16"


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def get_environ(self) -> dict[str, Any]:
        """`HTTPS` is what makes wsgiref's `wsgi.url_scheme`, and the process's environment may have it, too."""
        return {**super().get_environ(), "HTTPS": "on" if isinstance(self.connection, ssl.SSLSocket) else "off"}

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, tls: FleetTls | None) -> None:
        self._tls = tls
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._admission = Admission(CONNECTIONS_MAX, CONNECTIONS_MAX)  # none is ever welcomed: each may make way
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._admission.admit(request)
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread."""
        request.settimeout(_Handler.timeout)
        if self._tls is None or request.recv(1, socket.MSG_PEEK) != _TLS_HANDSHAKE:
            super().finish_request(request, client_address)
            return
        with self._tls.wrap(request.dup()) as secured:  # whoever ends the connection does so by `request`
            super().finish_request(secured, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._admission.left(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in self._admission.connected():
            with contextlib.suppress(OSError):  # the other end has left already
                connection.shutdown(socket.SHUT_RDWR)
            self.shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The base class prints a traceback, and strangers could fill the log."""
        log.debug("a connection to the port of metrics has failed", exc_info=True)


def serve_http(
    host: str, port: int, application: WSGIApplication, tls: FleetTls | None = None
) -> tuple[str, Callable[[], None]]:
    """Serves in a thread of its own; returns "host:port" and what stops it. Raises OSError when the port is taken."""
    server = _Server(host, port, tls)
    server.set_app(application)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"{host}:{server.server_port}", stop
