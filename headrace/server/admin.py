# SPDX-License-Identifier: Apache-2.0
"""Routes about the server itself: /health, /health_generate, /version, /server_info."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace import __version__
from headrace.sampling_params import SamplingParams
from headrace.server.body import unless_disconnected
from headrace.server.context import ServerContext, context_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are taken and answered; 503 with the reason while the model loads, the server drains, or the
    engine is gone."""
    refusal = context_of(request).health()
    if refusal is not None:
        raise refusal
    return JSONResponse({"status": "ok"})


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 when the engine has really made a token."""
    await unless_disconnected(request, make_a_token(context_of(request)))
    return JSONResponse({"status": "ok"})


async def make_a_token(context: ServerContext) -> None:
    stream = context.llm.generate([0], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    try:
        await stream.final()
    finally:
        stream.close()


@router.get("/version")
async def show_version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """What the engine settled on at start-up, and its counters now."""
    context = context_of(request)
    engine = msgspec.to_builtins(context.llm.info)
    stats = await context.llm.get_stats()
    return JSONResponse({"version": __version__, "engine": engine, "stats": stats})
