"""The error vocabulary: every error a user can meet, by whose fault it is, and how each protocol says it.

Invariants:
- one class per kind of failure; its `code` is the word in gRPC details, HTTP bodies, logs and docs;
- a message names what is wrong and, in `hint`, what would be right.
"""

from __future__ import annotations

from typing import ClassVar


class LaminarError(Exception):
    """Base of all errors that cross a process boundary. `hint` says what would be right."""

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
    """A field or value we refuse by name rather than drop silently."""

    code = "unsupported_field"


class UnknownModel(LaminarError):
    """No such model here; the message lists those that exist."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


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


class StaleEpoch(Conflict):
    """The caller speaks for an epoch that a later election has ended."""

    code = "stale_epoch"
    grpc_status = "ABORTED"


class OutOfCapacity(LaminarError):
    """Full now; `retry_after_s` says when to try again."""

    code = "out_of_capacity"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class TooLarge(LaminarError):
    """It can never fit: a version larger than the pool, a prompt longer than the context."""

    code = "too_large"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class Unavailable(LaminarError):
    """Something outside is away: etcd, a relay, every engine. A later retry may do."""

    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class Preparing(Unavailable):
    """What is asked for is being made ready, and goes on though this call ends; the message says how far it is."""

    code = "preparing"


class TurnLost(Unavailable):
    """A turn that had begun came to nothing; the message says why. Sent again, its request begins anew or goes on."""

    code = "turn_lost"


class InDoubt(LaminarError):
    """No live process can know the outcome; the message says how to find out."""

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
"""The one table from a wire code back to its class."""
