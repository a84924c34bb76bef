# SPDX-License-Identifier: Apache-2.0
"""Reading a request's JSON, and noticing that its sender has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from headrace.server.openai.protocol.errors import InvalidJsonError, request_error

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


async def parse_body(request: Request, model: type[Model]) -> Model:
    """The body as a request model.

    Raises:
        RequestError: not JSON, or a field that is wrong, with `param` set.
        BodyTooLargeError: over the limit.
    """
    raw = await request.body()
    if not raw:
        raise InvalidJsonError("The body is empty; send a JSON object.")
    try:
        return model.model_validate_json(raw)
    except ValidationError as report:
        raise request_error(report, model) from None


def documents(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` with `parse_body`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


async def wait_disconnected(receive: Receive) -> None:
    """Return when the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it as soon as the client has gone.

    Raises:
        ClientDisconnect: the client left first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await cancel(task, gone)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel what still runs and wait until it has ended; results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
