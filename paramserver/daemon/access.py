"""Access to a relay's gRPC port: mutual TLS, and the interceptor that checks each call against the one table.

Invariants:
- a connection without a certificate of one of the fleet's CAs ends in its handshake;
- who calls is read from the certificate of the connection, never from what was sent;
- files that change count for the next connection. Those that stand go on.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from paramserver.core import access
from protos import grpc_errors
from protos.access import certificates
from protos.access.credentials import Credentials, Material
from protos.access.fleet import Identity, identity_of
from protos.errors import Forbidden, InvalidRequest, LaminarError, Unauthenticated

Context = grpc.aio.ServicerContext[Any, Any]
_URIS = "peer_uri"
"""gRPC's name of the URIs in a peer's certificate."""


def check_serves(credentials: Credentials, host: str) -> None:
    """InvalidRequest unless a relay can serve with these: by its role, and by the names in its certificate."""
    role = credentials.identity.role
    if role != "relay":
        raise InvalidRequest(
            f"{credentials.directory} has a certificate with the role {role}, and only a relay's may serve",
            hint="`paramserver credentials issue DIR relay NAME` makes one",
        )
    certificate = certificates.read_certificates(credentials.material.certificate, str(credentials.directory))[0]
    if not certificates.covers(certificate, host):
        raise InvalidRequest(
            f"the certificate in {credentials.directory} is for {', '.join(credentials.material.hosts)}, and others "
            f"reach this relay by {host}",
            hint=f"`paramserver credentials issue DIR relay NAME --host {host}`, or --advertise one of those names",
        )


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Those of a port that follows the files: each connection gets the certificates of its time."""
    taken = credentials.material

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal taken
        material = credentials.material
        if material is taken:
            return None
        taken = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(taken),
        changed,  # type: ignore[arg-type]  # None, which gRPC documents, is not in its types
        require_client_authentication=True,
    )


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Refuses each call that the caller's certificate does not allow."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # no such method: gRPC answers so
        return self._guarded(handler, handler_call_details.method)

    def _guarded(self, handler: Any, method: str) -> Any:
        """The same handler behind the check. What a call is can be seen of its connection, so only within it."""
        kind = ("stream" if handler.request_streaming else "unary") + "_"
        kind += "stream" if handler.response_streaming else "unary"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        behavior = self._checked(getattr(handler, kind), method)
        return make(behavior, handler.request_deserializer, handler.response_serializer)

    def _checked(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behavior):

            async def replies(request: Any, context: Context) -> AsyncIterator[Any]:
                await self._check(method, context)
                async for reply in behavior(request, context):
                    yield reply

            return replies

        async def reply(request: Any, context: Context) -> Any:
            await self._check(method, context)
            return await behavior(request, context)

        return reply

    async def _check(self, method: str, context: Context) -> None:
        if (error := self._refused(method, context)) is not None:
            await grpc_errors.abort(context, error)

    def _refused(self, method: str, context: Context) -> LaminarError | None:
        try:
            caller = caller_of(context)
        except InvalidRequest as error:
            return Unauthenticated(error.message, hint=error.hint)
        reason = access.refusal(method, caller, self._credentials.identity.name)
        return Forbidden(reason, hint=access.hint(method)) if reason else None


def caller_of(context: Context) -> Identity:
    """The identity in the certificate of the call's connection. InvalidRequest where it names none."""
    found = context.auth_context().get(_URIS, ())
    return identity_of(uri.decode("ascii", "replace") for uri in found)
