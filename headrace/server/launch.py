# SPDX-License-Identifier: Apache-2.0
"""`headrace serve`: the port first, then the model; and an end that leaves nothing behind.

While the model loads, the port answers 503 (`/health` says that it loads). SIGINT or SIGTERM drains: `/health` turns
503, new requests get 503, running ones have `drain_timeout_s`; what then still runs ends with an error. A second signal
ends the draining, a third ends the process at once. A dead engine ends the server with exit code 1.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Generator
from typing import Any

import uvicorn

from headrace.config.llm_args import LlmArgs
from headrace.config.server import ServerConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import ConfigError
from headrace.logger import get_logger, set_level
from headrace.server.app import create_app
from headrace.server.body import cancel
from headrace.server.context import Lifecycle
from headrace.utils.phases import Phases, process_began

logger = get_logger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
# How long a server with a dead engine still answers 503, so that probes and pending clients see the reason.
LINGER_SECONDS = 2.0
# For connections to take their last bytes, after the draining.
CLOSE_SECONDS = 1


def run_server(args: LlmArgs, server: ServerConfig) -> int:
    """Serve until a signal or the engine's death. Main thread only.

    Returns:
        exit code: 0 after a drained stop, 128 + signal when stopped while loading or by force, 1 when the engine died.

    Raises:
        ConfigError: the address cannot be used, or a setting is impossible.
        ModelLoadError: the model cannot be loaded.
    """
    phases = Phases(process_began())
    phases.end_of("imports")
    set_level(server.log_level)
    listener = listen(server.host, server.port)
    with listener:
        factory = _uvicorn_config(None, server).get_loop_factory() or asyncio.new_event_loop
        loop = factory()
        try:
            asyncio.set_event_loop(loop)
            serving = Serving(args, server, listener, phases)
            code = loop.run_until_complete(serving.run())
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()
    if serving.is_load_abandoned:
        # A thread in the middle of a download cannot be stopped, and Python's own exit would wait for it.
        sys.stderr.flush()
        os._exit(code)
    return code


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; from here on the port is ours.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host = '{host}' is not an address of this machine ({error.strerror}).", param="host"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        # A port whose last server has just gone can be had at once; two that listen cannot share one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"Port {port} on {host} is in use by another program; stop it, or choose another with --port."
        elif error.errno == errno.EACCES:
            message = f"Port {port} on {host} needs more rights than this user has; choose one over 1023 with --port."
        else:
            message = f"Cannot listen on {host}, port {port}: {os.strerror(error.errno or 0)}."
        raise ConfigError(message, param="port") from None
    return listener


def _uvicorn_config(app: object, server: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=server.keep_alive_timeout_s,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        backlog=BACKLOG,
    )


class HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Serving:
    """One run of the server, from loading to the end."""

    def __init__(self, args: LlmArgs, server: ServerConfig, listener: socket.socket, phases: Phases) -> None:
        """phases: of the program's start so far."""
        self._server = server
        self._listener = listener
        self._llm = AsyncLLM(args, phases=phases)
        self._phases = phases
        self._lifecycle = Lifecycle("loading")
        self._http = HttpServer(_uvicorn_config(create_app(self._llm, server, self._lifecycle), server))
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._signals: list[signal.Signals] = []
        self.is_load_abandoned = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.ensure_future(self._http.serve(sockets=[self._listener]))
        try:
            return await self._serve(http)
        finally:
            # First the engine, which ends what is pending with its reason; then the connections.
            self._llm.shutdown()
            self._http.should_exit = True
            await asyncio.wait({http})
            if http.exception() is not None:
                logger.error("The HTTP server failed", exc_info=http.exception())
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    async def _serve(self, http: "asyncio.Future[None]") -> int:
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        self._phases.end_of("server listening")
        load: asyncio.Future[Any] = asyncio.ensure_future(self._llm.start())
        tasks: list[asyncio.Future[Any]] = [stop, load]
        try:
            await asyncio.wait({stop, load, http}, return_when=asyncio.FIRST_COMPLETED)
            if not load.done():
                self.is_load_abandoned = True
                return self._interrupted()
            load.result()
            self._llm.on_death(self._lifecycle.die)
            self._lifecycle.serve()
            self._announce()
            dead: asyncio.Future[Any] = asyncio.ensure_future(self._llm.dead.wait())
            tasks.append(dead)
            await asyncio.wait({stop, dead, http}, return_when=asyncio.FIRST_COMPLETED)
            if dead.done() or not stop.done():
                return await self._end_dead()
            return await self._drain(dead)
        finally:
            await cancel(*tasks)

    def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        logger.info("Serving '%s' on http://%s:%d/v1 (Ctrl-C stops)", self._llm.info.model_name, host, port)

    async def _drain(self, dead: "asyncio.Future[Any]") -> int:
        self._lifecycle.drain()
        running = self._lifecycle.num_requests
        if running:
            logger.info("Stopping: %d requests have %g s to finish", running, self._server.drain_timeout_s)
        idle: asyncio.Future[Any] = asyncio.ensure_future(self._lifecycle.wait_idle())
        force: asyncio.Future[Any] = asyncio.ensure_future(self._force.wait())
        try:
            await asyncio.wait(
                {idle, force, dead}, timeout=self._server.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if force.done():
                return self._interrupted()
            if dead.done():
                return 1
            if not idle.done():
                logger.warning("Stopping: %d requests were cut off", self._lifecycle.num_requests)
            return 0
        finally:
            await cancel(idle, force)

    async def _end_dead(self) -> int:
        reason = self._llm.dead_reason or "the HTTP server ended"
        self._lifecycle.die(reason)
        logger.error("The engine is gone: %s", reason)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stop.wait(), LINGER_SECONDS)
        return 1

    def _interrupted(self) -> int:
        return 128 + self._signals[-1] if self._signals else 1

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        self._stop.set()
        if len(self._signals) == 2:
            self._force.set()
        elif len(self._signals) > 2:
            os._exit(128 + number)
