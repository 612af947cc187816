"""The errors that users see: one class for each kind of failure, with its code and status in HTTP and gRPC.

Invariants:
- the `code` of a class identifies it in gRPC trailers, HTTP bodies, logs and docs;
- a message names what is wrong, and `hint` what would be right.
"""

from __future__ import annotations

from typing import ClassVar


class LaminarError(Exception):
    """Base of all errors that cross a process boundary. `hint` names a way to avoid the error."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(LaminarError):
    """The caller sent something that no retry will make right."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class UnsupportedField(InvalidRequest):
    """A field or value that is refused by name rather than dropped silently."""

    code = "unsupported_field"


class UnknownModel(LaminarError):
    """No such model here; the message lists those that exist."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class Unauthenticated(LaminarError):
    """The caller sent no API key, or one that is not valid here."""

    code = "unauthenticated"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class Forbidden(LaminarError):
    """The caller's API key does not allow this; the message names what would."""

    code = "forbidden"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class NotFound(LaminarError):
    """A named session, version or engine does not exist."""

    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class Conflict(LaminarError):
    """The request contradicts present state: a second publisher, an ended session, a taken name."""

    code = "conflict"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class Misdirected(LaminarError):
    """Another gateway has what the request names. `url`: where that one is reached; empty while it is not known."""

    code = "misdirected"
    http_status = 421
    grpc_status = "FAILED_PRECONDITION"
    url_header: ClassVar[str] = "X-Laminar-Gateway"

    def __init__(self, message: str, *, hint: str = "", url: str = "") -> None:
        super().__init__(message, hint=hint)
        self.url = url


class VersionUnknown(Conflict):
    """No relay has announced the version that a trainer says it published. The announcement may still come: the request
    may be sent again after `retry_after_s`."""

    code = "version_unknown"
    retry_after_s = 1.0


class StaleEpoch(Conflict):
    """The caller's epoch was ended by a later election."""

    code = "stale_epoch"
    grpc_status = "ABORTED"


class OutOfCapacity(LaminarError):
    """A limit is reached now; the request may be sent again after `retry_after_s`."""

    code = "out_of_capacity"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class TooLarge(LaminarError):
    """The request exceeds a fixed limit: a version larger than the pool, a prompt longer than the context."""

    code = "too_large"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class Unavailable(LaminarError):
    """A dependency does not answer: etcd, a relay, every engine. A retry may succeed; `publish` makes it by itself."""

    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class WrongServer(Unavailable):
    """What answers at the address is another server. A retry does not help, unless the right one was there before."""

    code = "wrong_server"


class Preparing(Unavailable):
    """The request is in progress, and continues after this call; the message reports the progress."""

    code = "preparing"


class TurnLost(Unavailable):
    """A turn failed after its begin, for the reason in the message. A retry of its request restarts or resumes it."""

    code = "turn_lost"


class InDoubt(LaminarError):
    """The outcome is not known to any live process; the message names the way to find out."""

    code = "in_doubt"
    http_status = 503
    grpc_status = "UNKNOWN"


class Corrupt(LaminarError):
    """Bytes do not match their digest."""

    code = "corrupt"
    http_status = 500
    grpc_status = "DATA_LOSS"


class VersionLost(LaminarError):
    """No verified holder of the version is left."""

    code = "version_lost"
    http_status = 410
    grpc_status = "NOT_FOUND"


def _tree(cls: type[LaminarError]) -> list[type[LaminarError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _tree(child))]


BY_CODE: dict[str, type[LaminarError]] = {cls.code: cls for cls in _tree(LaminarError)}
"""The class of each code."""
