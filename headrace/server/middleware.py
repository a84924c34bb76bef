# SPDX-License-Identifier: Apache-2.0
"""What stands before the routes, as plain ASGI: request ids, keys, admission, limits on the body.

Keys are denied by default: every path needs one but those of `OPEN_PATHS`.
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import BodyTooLargeError, HeadraceError
from headrace.logger import get_logger
from headrace.server.context import SEQUENCES, ServerContext
from headrace.server.openai.protocol.errors import (
    AuthenticationError,
    InvalidJsonError,
    UnsupportedMediaError,
    error_body,
)

logger = get_logger(__name__)

OPEN_PATHS = frozenset({"/health"})
# They show what other clients ask: settings and paths, and the tokens of cached prompts.
ADMIN_PATHS = frozenset({"/server_info", "/kv_cache_events"})
# Answered in every phase: the first says which phase it is, the second does not need the engine.
PHASELESS_PATHS = frozenset({"/health", "/version"})
MAX_DISCARD_FACTOR = 8
MAX_DISCARD_SECONDS = 10.0


async def send_error(send: Send, error: HeadraceError) -> None:
    """Answer with the error and nothing else."""
    body = error_body(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_headers(error: HeadraceError) -> dict[str, str]:
    """Headers that belong to a status."""
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.status == 503:
        return {"retry-after": "1"}
    return {}


class RequestIdMiddleware:
    """`X-Request-Id` in and out: the client's where it is sane, else a new one; and the request log."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._log = context.config.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else uuid.uuid4().hex
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._log:
                took = time.perf_counter() - started
                logger.info("%s %s %d %.3f s %s", scope["method"], scope["path"], status, took, request_id)


class KeyMiddleware:
    """`Authorization: Bearer KEY` against the configured keys, in constant time, on bytes."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._keys = [key.encode() for key in context.config.api_key]
        self._admin_keys = [key.encode() for key in context.config.admin_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(scope):
            await send_error(send, AuthenticationError("A valid API key is needed: Authorization: Bearer KEY."))
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS:
            return True
        if path in ADMIN_PATHS and self._admin_keys:
            return _matches(scope, self._admin_keys)
        return not self._keys or _matches(scope, self._keys + self._admin_keys)


def _matches(scope: Scope, keys: Iterable[bytes]) -> bool:
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = given.partition(b" ")
    # Every key is compared, so that the time says nothing about which one was near.
    equal = [hmac.compare_digest(token.strip(), key) for key in keys]
    return scheme.lower() == b"bearer" and any(equal)


class AdmissionMiddleware:
    """Takes requests only while the server serves, and counts them and their sequences so that it can drain."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PHASELESS_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._context.health()
        if refusal is not None:
            await send_error(send, refusal)
            return
        lifecycle = self._context.lifecycle
        lifecycle.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            lifecycle.leave(scope.get(SEQUENCES, 0))


class BodyMiddleware:
    """JSON only, uncompressed, and not over `max_body_bytes`; a larger body is thrown away unread.

    The rest of a refused body is discarded up to a bound before the answer, since a client that is still sending
    would otherwise see a broken connection and not the 413.
    """

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._limit = context.config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._header_error(headers)
        if error is not None:
            if "expect" not in headers:
                await self._discard(receive)
            await send_error(send, error)
            return
        num_bytes = 0

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                if message.get("more_body", False):
                    await self._discard(receive)
                raise self._too_large()
            return message

        await self._app(scope, receive_within_limit, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is larger than this server takes (max_body_bytes is {self._limit}).")

    def _header_error(self, headers: Headers) -> HeadraceError | None:
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return InvalidJsonError("The Content-Length header is not a number.")
        if int(length) > self._limit:
            return self._too_large()
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            return UnsupportedMediaError("Compressed bodies are not read; send the JSON without Content-Encoding.")
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        # A page in a browser can send any other type to a server on localhost without asking first.
        if kind != "application/json" and not kind.endswith("+json"):
            return UnsupportedMediaError("The body must be JSON: send Content-Type: application/json.")
        return None

    async def _discard(self, receive: Receive) -> None:
        deadline = time.monotonic() + MAX_DISCARD_SECONDS
        num_bytes = 0
        more = True
        while more and num_bytes < self._limit * MAX_DISCARD_FACTOR:
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                return
            num_bytes += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)


class ErrorMiddleware:
    """The last resort: an error nobody expected is logged and answered as a 500 in the usual shape."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            if started or scope["type"] != "http":
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await send_error(send, HeadraceError("Internal server error; the server's log has the details."))
