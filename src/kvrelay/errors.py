"""Every error KVRelay raises on purpose. Each has one code on the wire and one HTTP status.

KVRelayError
├── StartError                     the process cannot start: one line, exit code 2
│   ├── ModelError                 missing, damaged or unsupported model
│   ├── MemoryShortage             not one sequence of full context fits
│   ├── AddressInUse               a port or address that cannot be bound
│   └── TransportMissing           the transport asked for cannot work on this machine
├── RequestError                   a request that ends in an error
│   ├── InvalidRequest       400   the user's input; `param` names the field
│   │   ├── UnknownModel     404
│   │   ├── BodyTooLarge     413
│   │   └── HeadTooLarge     431
│   ├── Overloaded           429   with Retry-After
│   ├── NoWorkers            503   no pair of workers can serve
│   ├── WorkerLost           503   a worker died with the request
│   ├── Draining             503   the worker is leaving
│   ├── HandOverFailed       500   KV did not arrive whole and intact
│   ├── InternalError        500   a fault of ours, logged where it happened
│   ├── UnknownRequest       500   a worker was asked about a request that it does not have
│   ├── DeadlineExceeded     504
│   └── ClientGone           499   the client left or stopped reading; nobody sees it but the logs
└── WireError                      a frame or message that is not what the protocol says
"""

from typing import ClassVar


class KVRelayError(Exception):
    """Root of all errors raised on purpose. The text is a sentence for a person."""


class StartError(KVRelayError):
    """The process cannot start with these settings on this machine."""


class ModelError(StartError):
    """The model is missing, damaged, or of a kind that is not supported."""


class MemoryShortage(StartError):
    """The KV memory cannot hold one sequence of the full context length."""


class AddressInUse(StartError):
    """An address that should be bound is taken or not of this machine."""


class TransportMissing(StartError):
    """The transport asked for cannot work on this machine."""


class WireError(KVRelayError):
    """A frame or message that is not what the protocol says. Counted, never fatal."""


class RequestError(KVRelayError):
    """A request that ends in an error. `code` goes over the wire, `status` over HTTP."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The user's input cannot be served as it is."""

    code, status, type = "invalid_request", 400, "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and completion do not fit into the model's context."""

    code = "context_length_exceeded"


class UnknownModel(InvalidRequest):
    """The model asked for is not the one served."""

    code, status = "model_not_found", 404


class BodyTooLarge(InvalidRequest):
    """The body is larger than `--max-body-bytes`."""

    code, status = "body_too_large", 413


class HeadTooLarge(InvalidRequest):
    """The request's line and headers are larger than any client's should be."""

    code, status = "head_too_large", 431


class Overloaded(RequestError):
    """Everything is full; try again after `retry_after_s`."""

    code, status, type = "overloaded", 429, "rate_limit_error"


class NoWorkers(RequestError):
    """No pair of workers can serve requests now."""

    code, status = "no_workers", 503


class WorkerLost(RequestError):
    """A worker died while it had the request."""

    code, status = "worker_lost", 503


class Draining(RequestError):
    """The worker takes nothing new because it is leaving."""

    code, status = "draining", 503


class HandOverFailed(RequestError):
    """The KV did not reach a decode worker whole and intact in time."""

    code = "hand_over_failed"


class InternalError(RequestError):
    """A fault of ours; the log of the process that met it says more."""


class UnknownRequest(RequestError):
    """A worker was asked about a request that it does not have."""

    code = "unknown_request"


class DeadlineExceeded(RequestError):
    """The request's time ran out."""

    code, status, type = "deadline_exceeded", 504, "timeout_error"


class ClientGone(RequestError):
    """The client left, or read nothing for too long."""

    code, status = "client_gone", 499


def _all_request_errors(root: type[RequestError]) -> list[type[RequestError]]:
    return [root, *(error for child in root.__subclasses__() for error in _all_request_errors(child))]


_BY_CODE = {error.code: error for error in reversed(_all_request_errors(RequestError))}


def from_code(code: str, message: str) -> RequestError:
    """Rebuilds the error a worker reported; a code nobody knows becomes InternalError."""
    return _BY_CODE.get(code, InternalError)(message)
