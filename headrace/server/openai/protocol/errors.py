# SPDX-License-Identifier: Apache-2.0
"""The one shape every error leaves in, and the one place where a pydantic report becomes a sentence."""

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace.errors import HeadraceError, RequestError
from headrace.utils.spelling import nearest

# Over this, listing them only to name the first would cost more than the request.
MAX_COMPLAINTS = 1000


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorInfo


class UnknownParameterError(RequestError):
    code = "unknown_parameter"


class UnsupportedParameterError(RequestError):
    """A field that is known and cannot be honoured here: refused, never accepted and ignored."""

    code = "unsupported_parameter"


class InvalidJsonError(RequestError):
    code = "invalid_json"


class UnsupportedMediaError(RequestError):
    """A content type or encoding that is not read."""

    status = 415
    code = "unsupported_media_type"


class AuthenticationError(RequestError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class NotFoundError(RequestError):
    status = 404
    code = "not_found"


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


def error_body(error: HeadraceError) -> bytes:
    """JSON of `{"error": {message, type, param, code}}`."""
    info = ErrorInfo(message=error.message, type=error.type, param=error.param, code=error.code)
    return ErrorResponse(error=info).model_dump_json().encode()


def request_error(report: ValidationError, model: type[BaseModel] | None = None) -> RequestError:
    """The first complaint of a pydantic report, as a sentence that names the field and never repeats the body."""
    if report.error_count() > MAX_COMPLAINTS:
        return RequestError(f"The body has {report.error_count()} fields that are unknown or wrong.")
    first = report.errors(include_url=False, include_context=True)[0]
    if first["type"] == "json_invalid":
        reason = first["ctx"]["error"] if "ctx" in first else "it cannot be parsed"
        return InvalidJsonError(f"The body is not valid JSON: {reason}.")
    param = param_path(first["loc"])
    if first["type"] == "extra_forbidden":
        known = list(model.model_fields) if model is not None and len(first["loc"]) == 1 else []
        near = nearest(param, known)
        hint = f"; did you mean '{near}'?" if near else "."
        return UnknownParameterError(f"Unknown parameter: '{param}'{hint}", param=param or None)
    if first["type"] == "missing":
        return RequestError(f"Missing required parameter: '{param}'.", param=param or None)
    if not param:
        return RequestError("The body must be a JSON object.")
    return RequestError(f"Invalid value for '{param}': {_complaint(first)}.", param=param)


def param_path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "~text", "role") -> "messages[0].role"; parts that start with ~ name a branch of a union."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("~"):
            path += f".{part}" if path else part
    return path[:200]


def _complaint(first: ErrorDetails) -> str:
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    message = message[:1].lower() + message[1:]
    value = first["input"]
    if isinstance(value, bool | int | float) and value is not None:
        return f"{message}, got {str(value).lower() if isinstance(value, bool) else str(value)[:40]}"
    return message
