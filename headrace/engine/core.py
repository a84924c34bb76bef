# SPDX-License-Identifier: Apache-2.0
"""EngineCore: the loop that everything else serves. `step` is the page to read; `step_overlapped` is what runs.

The core decides with integers: the scheduler makes a plan, the executor launches it, and what came of it goes back to
the scheduler, in launch order. `CoreLoop` adds the sockets: requests are taken in between steps, results go out after
each, and the loop sleeps when there is nothing to do.
"""

import socket
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from headrace.core.kv_events import NOT_KEPT, EventLog, EventPage
from headrace.core.output import RequestDelta, SchedulerOutput
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.executor import Executor, PendingOutput
from headrace.engine.garbage import IdleCollector
from headrace.engine.idle import IdleTime
from headrace.engine.ipc import (
    Abort,
    Dying,
    EngineInfo,
    EngineRequest,
    Finish,
    FromCore,
    GetStats,
    Goodbye,
    Hello,
    KvEvents,
    Outputs,
    ReadEvents,
    Ready,
    Stats,
    Submit,
    ToCore,
    Trace,
    decode_to_core,
    encode,
)
from headrace.engine.step_times import StepTimes
from headrace.engine.step_trace import StepTrace
from headrace.errors import HeadraceError, RequestError
from headrace.logger import get_logger

logger = get_logger(__name__)


class EngineCore:
    """Scheduler and executor, and the plans that are launched and not yet reconciled."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, num_plans_in_flight: int, events: EventLog | None = None
    ) -> None:
        """
        Args:
            num_plans_in_flight: how far the host may run ahead of the device, in plans; 1 waits for each.
            events: the log that the scheduler's cache writes to; None: it writes none.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.num_plans_in_flight = num_plans_in_flight
        self.events = events
        self.num_reconciled_steps = 0
        self.times = StepTimes()
        self._launched: deque[tuple[SchedulerOutput, PendingOutput]] = deque()
        self._moves_blocks = scheduler.moves_blocks
        self._num_host_blocks = 0

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything."""
        return bool(self._launched) or self.scheduler.has_work() or self.scheduler.is_moving_blocks

    def step(self) -> list[RequestDelta]:
        """One step, waited for: the specification of `step_overlapped`, which must give the same tokens."""
        self._take_in_transfers()
        plan = self.scheduler.schedule()
        pending = None if plan is None else self._launch(plan)
        self._begin_transfers()
        if plan is None or pending is None:
            return []
        result = pending.wait()
        self.num_reconciled_steps += 1
        return self.scheduler.update(plan, result)

    def step_overlapped(self) -> list[RequestDelta]:
        """Launch plans until enough are in flight, then reconcile the oldest.

        With a depth of 2, step n + 1 is scheduled and launched before the result of step n is known: its rows go one
        token on from wherever the device has got to.
        """
        times = self.times
        self._take_in_transfers()
        while len(self._launched) < self.num_plans_in_flight:
            plan = self.scheduler.schedule()
            times.end_of("schedule")
            if plan is None:
                break
            self._launched.append((plan, self._launch(plan)))
            times.end_of("launch")
        self._begin_transfers()
        if not self._launched:
            return []
        plan, pending = self._launched.popleft()
        result = pending.wait()
        times.end_of("wait")
        self.num_reconciled_steps += 1
        deltas = self.scheduler.update(plan, result)
        times.end_of("update")
        return deltas

    def _launch(self, plan: SchedulerOutput) -> PendingOutput:
        self.executor.forward(plan)
        return self.executor.sample(plan, None)

    def _take_in_transfers(self) -> None:
        """What has moved since the last step, before the next plan is made."""
        if self._moves_blocks:
            for result in self.executor.poll_transfers():
                self.scheduler.take_in_transfer(result)

    def _begin_transfers(self) -> None:
        """Move blocks beside the plans that are launched."""
        if self._moves_blocks:
            num_ready = self.executor.num_ready_host_blocks()
            if num_ready > self._num_host_blocks:
                self._num_host_blocks = num_ready
                self.scheduler.set_host_blocks(num_ready)
            for transfer in self.scheduler.next_transfers():
                self.executor.transfer(transfer)

    def add(self, request: EngineRequest) -> None:
        """Take a request in.

        Raises:
            HeadraceError: it can never run.
        """
        self.scheduler.add_request(
            Request(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                priority=request.priority,
                cache_salt=request.cache_salt,
                cache_marks=request.cache_marks,
                retention=request.retention,
            )
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests, wherever they are; unknown ones are ignored."""
        self.scheduler.abort(list(request_ids))

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """End a request whose text met a stop string within its first `num_output_tokens` tokens."""
        self.scheduler.finish(request_id, num_output_tokens)

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler, as plain data."""
        values: dict[str, Any] = msgspec.to_builtins(self.scheduler.stats())
        totals = values["totals"]
        values["cache_hit_rate"] = totals["num_prefix_hit_tokens"] / max(1, totals["num_prefix_query_tokens"])
        values["num_plans_in_flight"] = len(self._launched)
        values["num_reconciled_steps"] = self.num_reconciled_steps
        values["step_times_s"] = dict(self.times.seconds)
        values["memory"] = self.executor.memory()
        return values

    def read_events(self, since: int, limit: int) -> EventPage:
        """KV cache events from the one with id `since` on.

        Raises:
            RequestError: none are kept, or there is no such id.
        """
        if self.events is None:
            raise RequestError(NOT_KEPT)
        return self.events.read(since, limit)


class CoreLoop:
    """Serves any number of front ends. Each has a ZMQ identity; a request belongs to the one that sent it."""

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        requests: "zmq.Socket[bytes]",
        life: socket.socket,
        collector: IdleCollector | None = None,
    ) -> None:
        """
        Args:
            requests: a bound ROUTER.
            life: end of file (or anything at all) on it ends the loop.
            collector: called where nothing runs.
        """
        self._core = core
        self._idle = IdleTime(core.executor.use_idle_time, collector)
        self._info = info
        self._socket = requests
        # A front end that is gone is an error when written to, not a silence: that is how its requests are found.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._poller = zmq.Poller()
        self._poller.register(requests, zmq.POLLIN)
        self._poller.register(life.fileno(), zmq.POLLIN)
        self._life = life.fileno()
        self._owner: dict[str, bytes] = {}
        self._front_ends: set[bytes] = set()
        self._num_joined = 0
        self._trace: StepTrace | None = None

    def run(self) -> None:
        """Loop until the life channel ends."""
        core = self._core
        step = core.step_overlapped if core.num_plans_in_flight > 1 else core.step
        steps_before = -1
        while True:
            # Work that cannot move (nothing in flight, nothing schedulable) must not spin.
            stuck = core.num_reconciled_steps == steps_before
            steps_before = core.num_reconciled_steps
            timeout_ms: int | None = (1 if stuck else 0) if core.has_work else None
            if timeout_ms is None:
                timeout_ms = self._idle.use(core.num_reconciled_steps)
            ready = dict(self._poller.poll(timeout_ms))
            if self._life in ready:
                return
            core.times.start()
            if self._socket in ready:
                self._take_messages()
            core.times.end_of("front_ends")
            deltas = step()
            if deltas:
                self._give(deltas)
            if core.events is not None:
                core.events.flush()
            core.times.end_of("front_ends")
            if self._trace is not None and self._trace.after_step(core.num_reconciled_steps, core.has_work):
                self._trace = None

    def say_goodbye(self, reason: str) -> None:
        """Tell every front end that nothing more will come."""
        for identity in list(self._front_ends):
            self._send(identity, [Dying(reason)])

    def _take_messages(self) -> None:
        while True:
            try:
                identity, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue
            try:
                messages = decode_to_core(data)
            except msgspec.MsgspecError as error:
                logger.warning("A front end sent what is not a message (%s); ignored.", error)
                continue
            self._front_ends.add(identity)
            for message in messages:
                self._take(identity, message)

    def _take(self, identity: bytes, message: ToCore) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                self._add(identity, request)
        elif isinstance(message, Finish):
            if self._disown(identity, message.request_id):
                self._core.finish(message.request_id, message.num_output_tokens)
        elif isinstance(message, Abort):
            self._core.abort([i for i in message.request_ids if self._disown(identity, i)])
        elif isinstance(message, GetStats):
            values = self._core.stats()
            values |= {"num_front_ends": len(self._front_ends), "has_idle_work": not self._idle.is_done}
            self._send(identity, [Stats(message.call_id, values)])
        elif isinstance(message, ReadEvents):
            self._read_events(identity, message)
        elif isinstance(message, Trace):
            self._begin_trace(identity, message)
        elif isinstance(message, Hello):
            self._num_joined += 1
            self._send(identity, [Ready(msgspec.structs.replace(self._info, front_end=self._num_joined))])
        elif isinstance(message, Goodbye):
            self._forget(identity)

    def _read_events(self, identity: bytes, message: ReadEvents) -> None:
        try:
            answer = KvEvents(message.call_id, self._core.read_events(message.since, message.limit))
        except RequestError as error:
            answer = KvEvents(message.call_id, error=error.message, param=error.param)
        self._send(identity, [answer])

    def _begin_trace(self, identity: bytes, message: Trace) -> None:
        def answer(values: dict[str, Any]) -> None:
            self._send(identity, [Stats(message.call_id, values)])

        if self._trace is not None:
            answer({"error": "a trace is running already; one at a time"})
            return
        core = self._core
        done = core.num_reconciled_steps
        self._trace = StepTrace(core.executor.tracer, core.times, done, message.num_steps, answer)

    def _add(self, identity: bytes, request: EngineRequest) -> None:
        try:
            if request.request_id in self._owner:
                raise HeadraceError(f"request_id {request.request_id!r} is in use.")
            self._core.add(request)
            self._owner[request.request_id] = identity
        except HeadraceError as error:
            delta = RequestDelta(request.request_id, [], finish_reason="error", error=error.message)
            self._send(identity, [Outputs([delta])])

    def _disown(self, identity: bytes, request_id: str) -> bool:
        """Whether the request is this front end's and still runs; it is nobody's from now on."""
        if self._owner.get(request_id) != identity:
            return False
        del self._owner[request_id]
        return True

    def _give(self, deltas: list[RequestDelta]) -> None:
        if len(self._front_ends) == 1:
            # All requests that run are its own: what a front end that has left still ran is aborted.
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._owner.pop(delta.request_id, None)
            self._send(next(iter(self._front_ends)), [Outputs(deltas)])
            return
        by_front_end: dict[bytes, list[RequestDelta]] = {}
        for delta in deltas:
            identity = self._owner.get(delta.request_id)
            if identity is None:
                continue
            by_front_end.setdefault(identity, []).append(delta)
            if delta.finish_reason is not None:
                del self._owner[delta.request_id]
        for identity, its_deltas in by_front_end.items():
            self._send(identity, [Outputs(its_deltas)])

    def _send(self, identity: bytes, messages: list[FromCore]) -> None:
        try:
            self._socket.send_multipart([identity, encode(messages)])
        except zmq.ZMQError as error:
            # Usual at the end: a front end that stops does not wait for what is still on its way to it.
            logger.debug("A front end is gone (%s); its requests are freed.", error)
            self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        self._front_ends.discard(identity)
        mine = [request_id for request_id, owner in self._owner.items() if owner == identity]
        for request_id in mine:
            del self._owner[request_id]
        self._core.abort(mine)
