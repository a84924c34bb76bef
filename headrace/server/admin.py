# SPDX-License-Identifier: Apache-2.0
"""Routes about the server itself: /health, /health_generate, /version, /server_info, /kv_cache_events."""

import asyncio

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace import __version__
from headrace.core.kv_events import EventPage, to_dict
from headrace.engine.async_llm import EVENTS_PER_READ
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.server.body import unless_disconnected
from headrace.server.context import ServerContext, context_of

router = APIRouter()

MAX_DIGITS = 18
"""Of a number in a query, so that it fits into 64 bits."""


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


@router.get("/kv_cache_events")
async def kv_cache_events(request: Request) -> Response:
    """What happened to cached blocks, from the event `since` on (0), at most `limit` (1000). Reading consumes nothing.

    A page may hold fewer than there are; `next` is the `since` of the next one, `lost` the number of those asked for
    that are kept no longer, and another `log_id` than before says that the engine was restarted.
    """
    unknown = sorted(request.query_params.keys() - {"since", "limit"})
    if unknown:
        raise RequestError(f"Unknown parameter: '{unknown[0][:40]}'; there are since and limit.", param=unknown[0][:40])
    since, limit = whole_number(request, "since", 0), whole_number(request, "limit", EVENTS_PER_READ)
    page = await context_of(request).llm.read_kv_cache_events(since, limit)
    # Large pages take tens of milliseconds to spell out.
    return Response(await asyncio.to_thread(page_body, page), media_type="application/json")


def whole_number(request: Request, name: str, default: int) -> int:
    """A query parameter.

    Raises:
        RequestError: it is no whole number of 0 or more.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > MAX_DIGITS:
        raise RequestError(f"{name} = {text[:40]!r} is not a whole number of 0 or more.", param=name)
    return int(text)


def page_body(page: EventPage) -> bytes:
    """JSON of a page of events."""
    events = [to_dict(event) for event in page.events]
    return msgspec.json.encode({"events": events, "next": page.next, "lost": page.lost, "log_id": page.log_id})
