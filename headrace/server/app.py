# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: routes, what stands before them, and how errors leave.

`create_app(llm, ServerConfig())` after `llm.start()`; or before it, with a `Lifecycle("loading")`.
"""

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace import __version__
from headrace.config.server import ServerConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import HeadraceError
from headrace.logger import get_logger
from headrace.server import admin
from headrace.server.context import Lifecycle, ServerContext
from headrace.server.middleware import (
    AdmissionMiddleware,
    BodyMiddleware,
    ErrorMiddleware,
    KeyMiddleware,
    RequestIdMiddleware,
    error_headers,
)
from headrace.server.openai import chat, completions, models, tokenize
from headrace.server.openai.protocol.errors import MethodNotAllowedError, NotFoundError, error_body

logger = get_logger(__name__)


def create_app(llm: AsyncLLM, config: ServerConfig, lifecycle: Lifecycle | None = None) -> FastAPI:
    """
    Args:
        llm: the engine; its life is the caller's business.
        lifecycle: the phase the server is in; serving, where none is given.
    """
    context = ServerContext(llm, config, lifecycle or Lifecycle())
    app = FastAPI(
        title="Headrace",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_middleware(context),
    )
    app.state.context = context
    for router in (chat.router, completions.router, models.router, tokenize.router, admin.router):
        app.include_router(router)
    app.add_exception_handler(HeadraceError, _headrace_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    return app


def _middleware(context: ServerContext) -> list[Middleware]:
    """Outermost first."""
    origins = context.config.allow_origins
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    own = (RequestIdMiddleware, ErrorMiddleware, KeyMiddleware, AdmissionMiddleware, BodyMiddleware)
    return [*([cors] if origins else []), *(Middleware(cls, context=context) for cls in own)]


async def _headrace_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    if error.status == 500:
        logger.warning("%s %s: %s", request.method, request.url.path, error.message)
    return Response(
        error_body(error), status_code=error.status, headers=error_headers(error), media_type="application/json"
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or a method the path does not have."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        return await _headrace_error(request, MethodNotAllowedError(f"There is no {what}; try another method."))
    if error.status_code == 404:
        return await _headrace_error(request, NotFoundError(f"There is no {what} on this server."))
    plain = HeadraceError(str(error.detail))
    plain.status = error.status_code
    return await _headrace_error(request, plain)


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; 499 is what logs know it by."""
    return Response(status_code=499)
