# SPDX-License-Identifier: Apache-2.0
"""A front end's side of the core: starts it (a process of its own, or a thread for debugging) and talks to it.

`CoreOwner` is the life of a core: spawn, progress, last words, exit. `CoreClient` is the traffic: one asyncio DEALER,
messages of one turn of the event loop sent as one frame. A front end that did not start the core uses `connect`.
"""

import asyncio
import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

import headrace
from headrace import envs, errors
from headrace.config.llm_args import LlmArgs
from headrace.engine.core_main import run_core
from headrace.engine.executor import DEVICE_FACTS, UNIPROC, WORKER, ProgressCallback
from headrace.engine.ipc import (
    EngineInfo,
    Failed,
    FromCore,
    Goodbye,
    Hello,
    Progress,
    Ready,
    StartCore,
    ToCore,
    decode_from_core,
    encode,
    receive_life,
    send_life,
)
from headrace.errors import EngineDeadError, HeadraceError
from headrace.logger import get_logger
from headrace.utils.hub import ModelSource
from headrace.utils.threads import thread_environment

logger = get_logger(__name__)

STOP_WAIT_S = 0.8
"""What a core gets to stop by itself before it is killed."""
CONNECT_TIMEOUT_S = 10.0
MAX_SOCKET_PATH = 100
"""Bytes; the kernel's own limit is 107."""


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """How a core is started; tests replace its parts."""

    in_process: bool = False
    executor: str = UNIPROC
    worker: str = WORKER
    device_facts: str = DEVICE_FACTS

    @classmethod
    def from_environment(cls) -> "CoreOptions":
        """The usual parts; HEADRACE_INPROC puts the core in this process."""
        return cls(in_process=envs.is_on("HEADRACE_INPROC"))


class CoreOwner:
    """A started core, from its first breath to its exit code.

    One thread spawns it, reads what it says of its life, and waits for its end.
    """

    def __init__(
        self,
        args: LlmArgs,
        source: ModelSource,
        options: CoreOptions,
        on_progress: ProgressCallback,
        on_exit: Callable[[str], None],
    ) -> None:
        """
        Args:
            on_progress: called on this object's own thread.
            on_exit: called there with the reason, once, after `stop` too.
        """
        self.ready: Future[EngineInfo] = Future()
        self.process: subprocess.Popen[bytes] | None = None
        self._folder = _private_folder()
        self._start = StartCore(
            address=f"ipc://{self._folder}/core",
            args_json=args.model_dump_json(exclude_unset=True).encode(),
            source_kind=source.kind,
            source_path=str(source.path),
            source_name=source.name,
            source_original=source.original,
            executor=options.executor,
            worker=options.worker,
            device_facts=options.device_facts,
            parent_pid=os.getpid(),
            began=time.monotonic(),
        )
        self._on_progress = on_progress
        self._on_exit = on_exit
        self._failed: Failed | None = None
        self._stopping = False
        self._serves = False
        self._life, self._core_end = socket.socketpair()
        self._inner: threading.Thread | None = None
        self._in_process = options.in_process
        self._thread = threading.Thread(target=self._live, name="headrace-core-owner", daemon=True)
        self._thread.start()
        # No core outlives the interpreter, whoever forgets to shut it down.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the core: gently where it serves, at once where it still loads. Returns when it is gone."""
        if os.getpid() != self._start.parent_pid:
            # A fork of the process that owns the core.
            return
        if self._stopping:
            self._thread.join(STOP_WAIT_S)
            return
        self._stopping = True
        # Shut down rather than closed: the thread still reads from it.
        _shut(self._life)
        if not self._serves:
            self._kill()
        self._thread.join(STOP_WAIT_S)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(STOP_WAIT_S)

    def _kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def _live(self) -> None:
        reason = "the engine core could not be started"
        try:
            self._spawn()
            send_life(self._life, self._start)
            while (message := receive_life(self._life)) is not None:
                self._hear(message)
        except (OSError, msgspec.MsgspecError) as error:
            reason = f"the engine core could not be started: {error}"
        finally:
            reason = self._wait(reason)
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self.ready.done():
                self.ready.set_exception(self._failure(reason))
            self._on_exit(reason)
            self._life.close()
            self._core_end.close()
            atexit.unregister(self.stop)

    def _spawn(self) -> None:
        if self._in_process:
            self._inner = threading.Thread(target=self._run_inside, name="headrace-core", daemon=True)
            self._inner.start()
            return
        root = str(Path(headrace.__file__).parent.parent)
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        # The folder that the user stands in must not shadow modules; headrace may have been found through it.
        environment = os.environ | thread_environment() | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.engine.core_main", str(self._core_end.fileno())],
            pass_fds=[self._core_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=environment,
            # Ctrl-C in the terminal is the front end's to handle.
            start_new_session=True,
        )
        self._core_end.close()
        if self._stopping:
            self._kill()

    def _run_inside(self) -> None:
        start = receive_life(self._core_end)
        if isinstance(start, StartCore):
            run_core(start, self._core_end)
        _shut(self._core_end)

    def _hear(self, message: object) -> None:
        if isinstance(message, Progress):
            self._on_progress(message.label, message.done, message.total)
        elif isinstance(message, Ready):
            self._serves = True
            self.ready.set_result(message.info)
        elif isinstance(message, Failed):
            self._failed = message
            if message.traceback and self.ready.done():
                logger.error("The engine core died:\n%s", message.traceback.rstrip())

    def _wait(self, reason: str) -> str:
        """Wait for the end of the core and say what it died of."""
        if self._inner is not None:
            self._inner.join()
        if self.process is None:
            return self._failed.message if self._failed else "the engine core was shut down" if self._inner else reason
        code = self.process.wait()
        if self._failed is not None:
            return self._failed.message
        if self._stopping or code == 0:
            return "the engine core was shut down"
        if code < 0:
            hint = "; out of memory, if nobody sent it" if code == -signal.SIGKILL else ""
            return f"the engine core (process {self.process.pid}) was killed by {signal.Signals(-code).name}{hint}"
        return f"the engine core (process {self.process.pid}) exited with code {code}"

    def _failure(self, reason: str) -> HeadraceError:
        failed = self._failed
        if failed is None:
            return EngineDeadError(f"Start-up failed: {reason}.")
        kind = vars(errors).get(failed.kind, EngineDeadError)
        if failed.traceback:
            logger.debug("The engine core failed while starting:\n%s", failed.traceback.rstrip())
            return EngineDeadError(f"Start-up failed: {failed.message} (HEADRACE_LOG_LEVEL=debug shows where).")
        error: HeadraceError = kind(failed.message, param=failed.param)
        return error


class CoreClient:
    """Sends requests to a core and receives what comes of them. Belongs to one event loop."""

    def __init__(self, info: EngineInfo, owner: CoreOwner | None) -> None:
        self.info = info
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._outbox: list[ToCore] = []
        self._closed = False
        self._monitor: zmq.asyncio.Socket | None = None
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def launch(
        cls,
        args: LlmArgs,
        source: ModelSource,
        options: CoreOptions,
        on_progress: ProgressCallback,
        on_exit: Callable[[str], None],
    ) -> "CoreClient":
        """Start a core and wait until it serves.

        Args:
            on_progress: called on another thread.
            on_exit: called on this loop with the reason when the core has ended.

        Raises:
            HeadraceError: what went wrong in the core, as the class it was there; EngineDeadError for a crash.
        """
        loop = asyncio.get_running_loop()
        owner = CoreOwner(args, source, options, on_progress, lambda reason: _call(loop, partial(on_exit, reason)))
        try:
            # Not wrap_future: cancelling this wait must leave the owner's future alone.
            done = asyncio.Event()
            owner.ready.add_done_callback(lambda _: _call(loop, done.set))
            await done.wait()
            info = owner.ready.result()
            client = cls(info, owner)
            client._socket.connect(info.address)
            return client
        except BaseException:
            owner.stop()
            raise

    @classmethod
    async def connect(cls, address: str, on_exit: Callable[[str], None]) -> "CoreClient":
        """Join a core that another front end started (`EngineInfo.address`).

        Raises:
            EngineDeadError: nothing answers there.
        """
        client = cls(NO_INFO, None)
        client._monitor = client._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client._socket.connect(address)
        try:
            client.send(Hello())
            first = await asyncio.wait_for(client.receive(), CONNECT_TIMEOUT_S)
        except asyncio.TimeoutError:
            client.close()
            raise EngineDeadError(f"No engine answers at {address} within {CONNECT_TIMEOUT_S:.0f} s.") from None
        if not isinstance(first[0], Ready):
            raise EngineDeadError(f"What answers at {address} is not an engine core.")
        client.info = first[0].info
        client._watcher = asyncio.ensure_future(client._watch(on_exit))
        return client

    def send(self, message: ToCore) -> None:
        """Queue a message; all of one turn of the loop leave as one frame."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    async def receive(self) -> list[FromCore]:
        """The next frame's messages."""
        return decode_from_core(await self._socket.recv())

    def close(self) -> None:
        """Leave the core; end it where this front end started it. Any number of times."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None and not self._loop.is_closed():
            self._watcher.cancel()
        if self._owner is None:
            # Past asyncio: the loop may have ended.
            zmq.Socket.shadow(self._socket).send(encode([*self._outbox, Goodbye()]), zmq.NOBLOCK)
        if self._monitor is not None:
            self._socket.disable_monitor()
        self._context.destroy(linger=100)
        if self._owner is not None:
            self._owner.stop()

    def _flush(self) -> None:
        if self._outbox and not self._closed:
            # Unlimited queue: the frame is taken at once, and the future needs no waiting for.
            self._socket.send(encode(self._outbox))
            self._outbox.clear()

    async def _watch(self, on_exit: Callable[[str], None]) -> None:
        """A front end that is not the owner learns of the core's end from its connection."""
        assert self._monitor is not None
        while not self._closed:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED and not self._closed:
                on_exit("the engine core closed its connection")
                return


NO_INFO = EngineInfo(
    model_name="", model_path="", architecture="", vocab_size=0, max_seq_len=0, max_batch_size=0, max_num_tokens=0,
    tokens_per_block=0, num_blocks=0, kv_bytes_per_token=0, device="", dtype="", attn_backend="",
    num_plans_in_flight=0, num_threads=0, load_seconds=0.0, core_pid=0, address="",
)  # fmt: skip


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="headrace-")
    if len(folder.encode()) + len("/core") > MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="headrace-", dir="/tmp")
    return folder


def _shut(channel: socket.socket) -> None:
    try:
        channel.shutdown(socket.SHUT_WR)
    except OSError:
        logger.debug("The core's life channel was closed already.")


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        logger.debug("The event loop is closed; %s is not called.", function)
