"""One tree of errors; `status` is the one map to HTTP.

CairnError                 500  our own fault, or unforeseen
|- InvalidRequest          400  a field is wrong; `field` names it, the message names the limit
|  |- ContextTooLong       400  code context_length_exceeded, with the figures
|  |- Unsupported          400  a field whose meaning is not built
|- Unauthorized            401
|- Forbidden               403
|  |- QuotaExceeded        403  code quota_exceeded: a tenant's storage limit is reached; `field` names the limit
|- NotFound                404  unknown model, request or route
|  |- UnknownModel         404  code model_not_found; the message lists the known names
|- MethodNotAllowed        405
|- RequestTimeout          408  the headers or the body did not arrive in time
|- Conflict                409
|  |- ConversationLocked   409  code conversation_locked
|  |- Damaged              409  code damaged: the log lost a turn; the message says what can be done
|- TooLarge                413
|- UnsupportedMedia        415  a body that is not application/json
|- HeadersTooLarge         431
|- Overloaded              429  the queue is full; `retry_after` is seconds
|  |- RateLimited          429  code rate_limit_exceeded: a tenant's rate limit is reached
|- Unavailable             503  starting, draining, or the worker is being replaced; `retry_after`
|  |- NotLoaded            503  code model_not_loaded: the model is being loaded from disk
|- DeadlineExceeded        504
|- Cancelled               499  cancelled by the client
|- GenerationFailed        500  this request failed (non-finite logits, repeated worker crashes)
|- ModelError              the model cannot be served; exit code 2
|  |- ModelFileError       a file is missing, broken or not what its header says
|  |- NoWorker             the worker process could not be started, or exited
|  |- NoDevice             the device is unknown, absent or unusable
|- DeviceError             500  a device failed in a step: its memory can no longer be trusted
|  |- DeviceMemoryError    500  a device has no memory left for a step
|- ConfigError             an option is unknown or out of range; exit code 2
"""

from __future__ import annotations

import re
import traceback
from typing import Self

NOTHING_LEFT = "logit_bias, penalties or a grammar left no token that could be chosen"
TOO_COMPLEX = "the grammar that the answer is held to became too complex to follow"
IMPOSSIBLE = frozenset({NOTHING_LEFT, TOO_COMPLEX})
"""Errors of a generation that the request itself causes: it would fail again."""


class CairnError(Exception):
    """Base of every error that Cairn raises on purpose. `str(error)` is one clear sentence for the caller."""

    status = 500
    code = "internal_error"
    exit_code = 1

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.retry_after = retry_after

    def named(self, message: str, field: str | None) -> Self:
        """Set the message and field name that the route uses, and return this error."""
        self.args, self.field = (message,), field
        return self


def by_code(code: str, message: str, field: str | None = None) -> CairnError:
    """Return an instance of the error class with this code; a plain CairnError if there is none."""
    kinds: list[type[CairnError]] = [CairnError]
    for kind in kinds:
        if kind.code == code:
            return kind(message, field=field)
        kinds.extend(kind.__subclasses__())
    return CairnError(message, field=field)


def trace(error: BaseException) -> str:
    """Format an unexpected error for the log: type and stack, without its message, which may quote a prompt."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}"


class InvalidRequest(CairnError):
    status = 400
    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, field: str | None = None, prompt_tokens: int | None = None, context: int | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.prompt_tokens = prompt_tokens
        """Tokens of the prompt, or a lower bound if it was not encoded to its end."""
        self.context = context


class Unsupported(InvalidRequest):
    code = "unsupported"


class UnknownResponse(InvalidRequest):
    code = "previous_response_not_found"


class Unauthorized(CairnError):
    status = 401
    code = "invalid_api_key"


class Forbidden(CairnError):
    status = 403
    code = "forbidden"


class QuotaExceeded(Forbidden):
    code = "quota_exceeded"


class NotFound(CairnError):
    status = 404
    code = "not_found"


class UnknownModel(NotFound):
    code = "model_not_found"


class MethodNotAllowed(CairnError):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(CairnError):
    status = 408
    code = "request_timeout"


class Conflict(CairnError):
    status = 409
    code = "conflict"


class ConversationLocked(Conflict):
    code = "conversation_locked"


class Damaged(Conflict):
    code = "damaged"


class TooLarge(CairnError):
    status = 413
    code = "request_too_large"


class UnsupportedMedia(CairnError):
    status = 415
    code = "unsupported_media_type"


class HeadersTooLarge(CairnError):
    status = 431
    code = "headers_too_large"


class Overloaded(CairnError):
    status = 429
    code = "overloaded"


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"


class Unavailable(CairnError):
    status = 503
    code = "unavailable"


class NotLoaded(Unavailable):
    code = "model_not_loaded"


class DeadlineExceeded(CairnError):
    status = 504
    code = "deadline_exceeded"


class Cancelled(CairnError):
    status = 499
    code = "cancelled"


class GenerationFailed(CairnError):
    status = 500
    code = "generation_failed"


class ModelError(CairnError):
    code = "model_error"
    exit_code = 2


class NoDevice(ModelError):
    code = "no_device"


class DeviceError(CairnError):
    code = "device_error"


class DeviceMemoryError(DeviceError):
    code = "device_out_of_memory"


class ModelFileError(ModelError):
    code = "model_file_error"


class NoWorker(ModelError):
    code = "no_worker"


class ConfigError(CairnError):
    code = "config_error"
    exit_code = 2


_UNKNOWN = re.compile(r"Object contains unknown field `(.{1,200})`", re.DOTALL)


def parted(error: Exception) -> tuple[str, str, str | None]:
    """Split a msgspec.ValidationError into its message, the path of the object, and the path of the field, if any."""
    said, _, where = str(error).rpartition(" - at ")  # names chosen by clients may contain " - at "
    said, where = (said, where) if said else (where, "")
    where = where.strip("`").removeprefix("$").lstrip(".")[:200]
    unknown = _UNKNOWN.fullmatch(said)
    field = ".".join(filter(None, (where, unknown[1] if unknown else "")))
    return said, where, field or None
