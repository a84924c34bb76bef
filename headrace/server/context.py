# SPDX-License-Identifier: Apache-2.0
"""What the routes of one server share: the engine, the settings, and the phase of its life."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal, cast

from starlette.requests import Request

from headrace.config.server import ServerConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import EngineDeadError, EngineOverloadedError, HeadraceError, ModelNotFoundError

SEQUENCES = "headrace.num_sequences"
"""Where a request's ASGI scope says how many sequences it generates."""

Phase = Literal["loading", "serving", "draining", "dead"]


class LoadingError(EngineOverloadedError):
    code = "model_loading"


class DrainingError(EngineOverloadedError):
    code = "server_stopping"


class Lifecycle:
    """The phase of the server's life, and how much it works on. Belongs to the event loop."""

    def __init__(self, phase: Phase = "serving") -> None:
        self.phase: Phase = phase
        self.reason = ""
        self.num_requests = 0
        """HTTP requests, of whatever kind."""
        self.num_sequences = 0
        """Choices that these generate, each until its request ends."""
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.num_requests += 1
        self._idle.clear()

    def leave(self, num_sequences: int) -> None:
        """A request ends, and with it the sequences it had."""
        self.num_requests -= 1
        self.num_sequences -= num_sequences
        if self.num_requests == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request is being worked on."""
        await self._idle.wait()

    def serve(self) -> None:
        if self.phase == "loading":
            self.phase = "serving"

    def drain(self) -> None:
        if self.phase != "dead":
            self.phase = "draining"

    def die(self, reason: str) -> None:
        self.phase = "dead"
        self.reason = reason

    def refusal(self) -> HeadraceError | None:
        """Why no request is taken now; None where one is."""
        if self.phase == "loading":
            return LoadingError("The model is still loading; try again in a moment.")
        if self.phase == "draining":
            return DrainingError("The server is stopping and takes no new requests.")
        if self.phase == "dead":
            return EngineDeadError(f"The engine is gone: {self.reason}")
        return None


@dataclass
class ServerContext:
    llm: AsyncLLM
    config: ServerConfig
    lifecycle: Lifecycle
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> list[str]:
        return [self.llm.info.model_name]

    def check_model(self, name: str | None) -> str:
        """The served name that a request asks for.

        Raises:
            ModelNotFoundError: it asks for none, or for one that is not here.
        """
        names = self.model_names
        if name is not None and name in names:
            return name
        served = ", ".join(f"'{n}'" for n in names)
        if not name:
            raise ModelNotFoundError(f"No 'model' was given; this server serves {served}.", param="model")
        raise ModelNotFoundError(
            f"The model '{name[:200]}' does not exist; this server serves {served}.", param="model"
        )

    def health(self) -> HeadraceError | None:
        """Why no request can be answered now, by the phase or a dead engine; None where all is well."""
        refusal = self.lifecycle.refusal()
        if refusal is None and not self.llm.is_alive:
            refusal = EngineDeadError(f"The engine is gone: {self.llm.dead_reason}")
        return refusal

    def admit(self, request: Request, num_sequences: int) -> None:
        """Count the sequences that a request is about to generate; `AdmissionMiddleware` takes them off again.

        Raises:
            EngineOverloadedError: the queue is full. A request that finds room is taken whole.
        """
        lifecycle, waiting = self.lifecycle, self.config.max_waiting_requests
        if waiting is not None and lifecycle.num_sequences >= self.llm.info.max_batch_size + waiting:
            raise EngineOverloadedError(f"The queue is full ({waiting} sequences wait); try again in a moment.")
        lifecycle.num_sequences += num_sequences
        request.scope[SEQUENCES] = num_sequences


def context_of(request: Request) -> ServerContext:
    """The context that `create_app` put on the application."""
    return cast(ServerContext, request.app.state.context)
