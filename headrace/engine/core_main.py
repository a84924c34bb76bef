# SPDX-License-Identifier: Apache-2.0
"""The core process: `python -m headrace.engine.core_main FD`, started by a front end that keeps the other end of FD.

It is told what to do over FD (a socket), loads, serves until FD ends, and says why before it dies of an error. It
never outlives the process that started it.
"""

import dataclasses
import gc
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.config.resolve import ResolvedConfig, resolve
from headrace.core.kv_events import EventLog
from headrace.core.scheduler import Scheduler
from headrace.engine.core import CoreLoop, EngineCore
from headrace.engine.executor import Executor, WorkerInfo, load_by_name
from headrace.engine.garbage import IdleCollector
from headrace.engine.ipc import EngineInfo, Failed, Progress, Ready, StartCore, receive_life, send_life
from headrace.engine.kv_event_stream import KvEventStream
from headrace.errors import HeadraceError, ModelLoadError
from headrace.logger import get_logger, set_process_name
from headrace.utils.cache import kernel_cache
from headrace.utils.hub import ModelSource
from headrace.utils.phases import Phases

logger = get_logger(__name__)

PARENT_POLL_S = 0.5
GRACE_S = 3.0
"""From the end of the parent to the end of this process, at most."""
PROGRESS_EVERY_S = 0.05


def main() -> NoReturn:
    """The process: returns to no one."""
    # The owner decides when the core stops: Ctrl-C in a terminal reaches every process of the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    life = socket.socket(fileno=int(sys.argv[1]))
    life.set_inheritable(False)
    set_process_name("core")
    # Nearly all that imports and loading make lives on: collections would find little, for a tenth of the time.
    gc.disable()
    start = receive_life(life)
    code = 0
    if isinstance(start, StartCore):
        threading.Thread(target=_die_with_parent, args=(life, start), daemon=True).start()
        code = 0 if run_core(start, life) else 1
        _remove_socket(start)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the device may still wait for work, and torch's teardown takes seconds: nothing is left to save.
    os._exit(code)


def run_core(start: StartCore, life: socket.socket) -> bool:
    """Load, serve until the life channel ends, and clean up. False after a failure, which has been reported."""
    phases = Phases(start.began)
    context = zmq.Context()
    executor: Executor | None = None
    loop: CoreLoop | None = None
    stream: KvEventStream | None = None
    try:
        requests = context.socket(zmq.ROUTER)
        requests.setsockopt(zmq.LINGER, 200)
        requests.setsockopt(zmq.SNDHWM, 0)
        requests.setsockopt(zmq.RCVHWM, 0)
        requests.bind(start.address)
        args = LlmArgs.model_validate_json(start.args_json)
        source = ModelSource(
            kind=start.source_kind, path=Path(start.source_path), name=start.source_name, original=start.source_original
        )
        phases.end_of("core process")
        device_facts, make_executor = load_by_name(start.device_facts), load_by_name(start.executor)
        load_by_name(start.worker)
        phases.end_of("imports of the worker")
        began = time.monotonic()
        config = resolve(args, load_model_config(source), device_facts(args.device))
        for note in config.notes:
            logger.info("%s", note)
        if config.device == "cuda":
            _keep_kernels(start)
        kv_config = args.kv_cache_config
        # First, as an address that cannot be had should not cost a load to find out.
        stream = KvEventStream(kv_config.kv_events_config) if kv_config.pushes_events else None
        executor = make_executor(config, source, start.worker)
        phases.end_of("device and settings")
        worker = _start(executor, source, _ProgressReporter(life))
        phases.add(worker.phases)
        for line in worker.ledger:
            logger.info("%s", line)
        config = dataclasses.replace(config, max_seq_len=worker.max_seq_len)
        events = EventLog.from_config(kv_config, config.max_seq_len, None if stream is None else stream.publish)
        scheduler = Scheduler.from_config(config, worker.layout, events, worker.num_host_blocks)
        info = describe(config, source, worker, start.address, time.monotonic() - began)
        core = EngineCore(scheduler, executor, config.num_plans_in_flight, events)
        # In a process of one's own; a thread of the user's leaves their collector alone.
        collector = IdleCollector() if start.parent_pid != os.getpid() else None
        loop = CoreLoop(core, info, requests, life, collector)
        phases.end_of("scheduler")
        send_life(life, Ready(msgspec.structs.replace(info, startup=phases.seconds)))
        loop.run()
        return True
    except BaseException as error:
        _report(life, error)
        if loop is not None:
            loop.say_goodbye(_sentence(error))
        return False
    finally:
        if executor is not None:
            _quietly(executor)
        if stream is not None:
            stream.close()
        context.destroy(linger=200)


def _keep_kernels(start: StartCore) -> None:
    """Say where what is compiled goes; before the first kernel is."""
    cache = kernel_cache(os.environ, _folder_of(start))
    os.environ.update(cache.environment)
    logger.log(logging.INFO if cache.is_kept else logging.WARNING, "%s", cache.note)


def _start(executor: Executor, source: ModelSource, progress: "_ProgressReporter") -> WorkerInfo:
    """Start the worker. What refuses a checkpoint there need not know which one it is: here it gets its name."""
    try:
        return executor.start(progress)
    except ModelLoadError as error:
        if str(source.path) in error.message:
            raise
        raise ModelLoadError(f"{source.path}: {error.message}", param=error.param) from None


def describe(
    config: ResolvedConfig, source: ModelSource, worker: WorkerInfo, address: str, load_seconds: float
) -> EngineInfo:
    """What front ends are told of a started engine."""
    return EngineInfo(
        model_name=config.args.served_model_name or source.original,
        model_path=str(source.path),
        architecture=config.model.architecture,
        vocab_size=config.model.vocab_size,
        max_seq_len=config.max_seq_len,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        tokens_per_block=worker.tokens_per_block,
        num_blocks=worker.layout.num_blocks,
        kv_bytes_per_token=worker.kv_bytes_per_token,
        device=config.device,
        dtype=config.dtype,
        attn_backend=worker.attn_backend,
        num_plans_in_flight=config.num_plans_in_flight,
        num_threads=config.num_threads,
        load_seconds=load_seconds,
        core_pid=os.getpid(),
        address=address,
        ledger=list(worker.ledger),
    )


class _ProgressReporter:
    """Sends the worker's progress up the life channel, twenty times a second at most."""

    def __init__(self, life: socket.socket) -> None:
        self._life = life
        self._last = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._last < PROGRESS_EVERY_S:
            return
        self._last = now
        send_life(self._life, Progress(label, done, total))


def _sentence(error: BaseException) -> str:
    if isinstance(error, HeadraceError):
        return error.message
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _report(life: socket.socket, error: BaseException) -> None:
    ours = isinstance(error, HeadraceError)
    where = "" if ours else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if where:
        logger.debug("%s", where)
    param = error.param if isinstance(error, HeadraceError) else None
    kind = type(error).__name__ if ours else "EngineDeadError"
    try:
        send_life(life, Failed(kind, _sentence(error), param, where))
    except OSError:
        logger.log(logging.DEBUG if ours else logging.ERROR, "The core stops: %s", where or error)


def _quietly(executor: Executor) -> None:
    try:
        executor.shutdown()
    except Exception as error:
        logger.debug("The worker did not shut down cleanly: %s", error)


def _die_with_parent(life: socket.socket, start: StartCore) -> None:
    """End this process when the one that started it ends, or closes the life channel, whatever the main thread does.

    The channel's end alone would not do (a child that the parent forked may hold it open), nor PR_SET_PDEATHSIG (it
    fires when the thread that started this process ends).
    """
    poller = select.poll()
    poller.register(life, select.POLLIN)
    while not poller.poll(PARENT_POLL_S * 1000):
        if os.getppid() != start.parent_pid:
            # Ends the main loop too, which listens to the same channel.
            life.shutdown(socket.SHUT_RDWR)
            break
    time.sleep(GRACE_S)
    _remove_socket(start)
    os._exit(1)


def _remove_socket(start: StartCore) -> None:
    """The folder of the request socket: the front end removes it too, unless it was killed."""
    shutil.rmtree(_folder_of(start), ignore_errors=True)


def _folder_of(start: StartCore) -> Path:
    """The folder that lives as long as this core."""
    return Path(start.address.removeprefix("ipc://")).parent


if __name__ == "__main__":
    main()
