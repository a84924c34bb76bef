# SPDX-License-Identifier: Apache-2.0
"""The one writer of server-sent events.

A stream is: opening chunks, chunks as the engine answers, one chunk with the usage where it was asked for, `[DONE]`.
A failure after the headers have gone is an event `{"error": ...}` and then the end without `[DONE]`, so that nobody
takes it for a complete answer.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.logger import get_logger
from headrace.server.body import cancel, wait_disconnected
from headrace.server.openai.generation import Delta, Generation
from headrace.server.openai.protocol.errors import error_body
from headrace.server.openai.protocol.generation import GenerationRequest, ResponseModel, Usage

logger = get_logger(__name__)

DONE = b"data: [DONE]\n\n"
# Line ends to clients that split text the way `str.splitlines` does, while JSON lets them stand.
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


class ChunkRenderer(Protocol):
    """Turns what the engine says into the chunks of one API."""

    def opening(self) -> Iterable[ResponseModel]:
        """Chunks that need no answer yet."""
        ...

    def render(self, delta: Delta) -> Iterable[ResponseModel]: ...

    def closing(self, usage: Usage) -> ResponseModel:
        """The chunk without choices that holds the usage."""
        ...


def event(data: bytes) -> bytes:
    for raw, escaped in LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


class ChunkEncoder:
    """Chunks as events: `usage` is absent where it was not asked for, else null, or the usage so far."""

    def __init__(self, generation: Generation, request: GenerationRequest) -> None:
        self._generation = generation
        self._exclude = None if request.include_usage else {"usage"}
        self._continuous = request.continuous_usage

    def encode(self, chunk: ResponseModel) -> bytes:
        if self._continuous:
            chunk = chunk.model_copy(update={"usage": self._generation.usage()})
        return event(chunk.model_dump_json(exclude=self._exclude).encode())


async def chunk_events(
    generation: Generation, renderer: ChunkRenderer, request: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """The whole stream as events. Closing it, or its end, aborts what still runs."""
    encoder = ChunkEncoder(generation, request)
    try:
        for chunk in renderer.opening():
            yield encoder.encode(chunk)
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                for chunk in renderer.render(delta):
                    yield encoder.encode(chunk)
        if request.include_usage:
            yield event(renderer.closing(generation.usage()).model_dump_json().encode())
        yield DONE
    except HeadraceError as error:
        yield event(error_body(error))
    except Exception:
        logger.exception("A stream failed")
        yield event(error_body(HeadraceError("Internal server error; the server's log has the details.")))
    finally:
        generation.close()


class EventStream(Response):
    """Sends events as they come, and stops at once when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        self.events = events
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: a proxy in between must not collect the events.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(wait_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await cancel(sending, gone)
            await self.events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.events):
            async for data in self.events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
