# SPDX-License-Identifier: Apache-2.0
"""Who runs next, and for how many tokens.

`schedule` makes a plan, `update` takes in its result. Any number of plans may be in flight: `schedule` counts on what
launched plans will have done, `update` is called in launch order. Requests that end leave at once; what plans in
flight still bring of them is dropped, and what these plans still write goes to blocks and rows that no plan launched
earlier gave to anybody else.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from headrace.config.resolve import ResolvedConfig
from headrace.core.block_moves import BlockMoves
from headrace.core.block_table import CLOSED, BlockTable
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.kv_events import EventLog
from headrace.core.limits import SchedulerLimits
from headrace.core.output import ModelOutput, RequestDelta, ScheduledRow, SchedulerOutput, TokenLogprobs
from headrace.core.policy import WaitingQueue, make_policy
from headrace.core.prefill_budget import cost, tokens_within
from headrace.core.request import Request, RequestStatus
from headrace.core.stats import Counters, SchedulerStats
from headrace.core.step import Step
from headrace.core.stop import check_stop, stop_reason
from headrace.core.transfer import Transfer, TransferResult
from headrace.errors import ConfigError, EngineError, RequestError

__all__ = ["Scheduler", "SchedulerLimits"]

WORTH_A_WAIT = 1024
"""Tokens that another request is computing, for which one waits a step or more instead of computing them as well; or
half of what it lacks."""


class Scheduler:
    """The life of every request of one engine, from `add_request` to its last delta, abort or `finish`."""

    def __init__(
        self, limits: SchedulerLimits, cache: KVCacheManager, now: Callable[[], float] = time.monotonic
    ) -> None:
        if not cache.fits(limits.max_seq_len):
            raise ConfigError(
                f"max_seq_len ({limits.max_seq_len}) needs {cache.num_blocks_for(limits.max_seq_len)} KV blocks and "
                f"there are {cache.num_blocks}: lower it to {cache.most_tokens(limits.max_seq_len)}."
            )
        self.limits = limits
        self.cache = cache
        self.now = now
        self.policy = make_policy(limits.policy)
        self.counters = Counters()
        self.waiting = WaitingQueue(self.policy)
        """WAITING and PREEMPTED requests."""
        self.running: dict[Request, None] = {}
        """RUNNING requests in order of admission. One that is in neither of the following is covered: launched plans
        bring all its output."""
        self._decodes: dict[Request, int] = {}
        """Those with one token to run, each with its row."""
        self._prefills: dict[Request, None] = {}
        """Those with more."""
        self._computing: dict[Request, None] = {}
        """Those whose prompt's KV is not all computed yet."""
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._last_updated_step_id = 0
        self._free_rows = list(range(limits.max_batch_size - 1, -1, -1))
        self._newly_freed_rows: list[int] = []
        self._moves: BlockMoves | None = None
        # The request that found no room, and `cache.num_releases` at that time: no need to look again before it moves.
        self._denied: tuple[Request, int] | None = None

    @classmethod
    def from_config(
        cls, config: ResolvedConfig, layout: CacheLayout, events: EventLog | None = None, num_host_blocks: int = 0
    ) -> "Scheduler":
        """A scheduler with a cache laid out as the worker's.

        events: told what the cache does. num_host_blocks: blocks of each group in the host tier; 0: there is none.
        """
        settings = config.args.kv_cache_config
        cache = KVCacheManager(
            layout,
            config.tokens_per_block,
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=settings.enable_partial_reuse,
            copy_on_partial_reuse=settings.copy_on_partial_reuse,
            max_tokens_in_flight=config.max_num_tokens * config.num_plans_in_flight,
        )
        if events is not None:
            events.created([cache.num_blocks, num_host_blocks, 0])
            cache.tree.events = events
        scheduler = cls(SchedulerLimits.from_config(config), cache)
        if num_host_blocks and config.enable_block_reuse:
            has_store = settings.disk_cache_path is not None or config.args.kv_connector_config is not None
            scheduler.add_host(settings.secondary_offload_min_priority, has_store=has_store)
        return scheduler

    def add_host(self, min_priority: int, *, has_store: bool) -> None:
        """Use host memory, as it becomes ready (`set_host_blocks`). has_store: and the storage below it."""
        self.cache.add_host(min_priority)
        self._moves = BlockMoves(self.cache, self.counters, has_store=has_store, now=self.now)

    # What the engine calls

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: an empty prompt, max_tokens below 1, or an id already in use.
            ContextLengthError: a prompt that leaves no room for one output token.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request_id {request.request_id!r} is in use by another request: choose a new one.")
        self.limits.check(request)
        request.max_total_tokens = min(request.max_total_tokens, self.limits.max_seq_len)
        self.counters.num_added_requests += 1
        request.arrival = self.counters.num_added_requests
        request.arrival_s = self.now()
        self._requests[request.request_id] = request
        self.waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests, wherever they are; nothing more is heard of them. Ids of ended requests are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, RequestStatus.FINISHED_ABORTED)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """End a request whose text is complete after `num_output_tokens` (a stop string); no delta follows."""
        request = self._requests.get(request_id)
        if request is not None:
            del request.token_ids[request.num_prompt_tokens + num_output_tokens :]
            request.num_computed_tokens = min(request.num_computed_tokens, len(request.token_ids))
            self._end(request, RequestStatus.FINISHED_STOPPED)

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    @property
    def num_plans_in_flight(self) -> int:
        return len(self._in_flight)

    def schedule(self) -> SchedulerOutput | None:
        """The next plan, launched as far as the scheduler knows; None: nothing can run before the next update."""
        step = Step(self.counters.num_steps + 1, self.cache)
        preempted = self._preempt_until_decodes_fit()
        num_decodes = len(self._decodes)
        covered = step.run_decodes(self._decodes)
        self.cache.reserve(0)
        num_prefill_tokens = self._schedule_prefills(step, num_decodes, may_admit=not preempted)
        if step.is_empty:
            if self._in_flight or not (preempted or self.running):
                return None
            if self.running:
                # Prefills that lack blocks, and nobody who would free any.
                self._make_way()
            return self.schedule()
        for request in covered:
            del self._decodes[request]
        self.counters.num_decode_tokens += num_decodes
        self.counters.num_prefill_tokens += num_prefill_tokens
        plan = step.plan(self._newly_freed_rows)
        self._newly_freed_rows = []
        self._in_flight.append((plan, step.requests))
        self.counters.num_steps = step.step_id
        return plan

    def update(self, plan: SchedulerOutput, output: ModelOutput) -> list[RequestDelta]:
        """Take in the result of the oldest plan in flight; what is new for the front ends."""
        launched, requests = self._in_flight.popleft()
        if launched is not plan or output.step_id != plan.step_id:
            raise EngineError(f"results of step {output.step_id} came while step {launched.step_id} was due")
        self._last_updated_step_id = plan.step_id
        deltas: list[RequestDelta] = []
        if output.counts is None:
            num_sampling = len(plan.decode_rows) + sum(chunk.samples for chunk in plan.chunks)
            if len(output.token_ids) != num_sampling:
                raise EngineError(
                    f"step {plan.step_id} samples {num_sampling} rows and {len(output.token_ids)} tokens came of it"
                )
            self._take_in_decodes(plan, requests, output, deltas)
            tokens = iter(output.token_ids[len(plan.decode_rows) :])
            for place, chunk in enumerate(plan.chunks, len(plan.decode_rows)):
                new = [next(tokens)] if chunk.samples else []
                self._take_in(requests[place], chunk, new, place, output, deltas)
        else:
            end = 0
            for place, (row, count) in enumerate(zip(plan.scheduled, output.counts, strict=True)):
                end += count
                self._take_in(requests[place], row, output.token_ids[end - count : end], place, output, deltas)
        return deltas

    # Blocks that move

    @property
    def moves_blocks(self) -> bool:
        """Whether there is a host tier: `next_transfers` and `take_in_transfer` are called around each step."""
        return self._moves is not None

    @property
    def is_moving_blocks(self) -> bool:
        """Whether the result of a transfer is about to come."""
        return self._moves is not None and self._moves.is_active

    def set_host_blocks(self, num_blocks: int) -> None:
        """The first `num_blocks` blocks of each group on the host can be used."""
        assert self.cache.tree.host is not None
        self.cache.tree.host.add_units(num_blocks)

    def next_transfers(self) -> list[Transfer]:
        """Blocks to move after the plans that are launched."""
        assert self._moves is not None
        self._bring_back(self._moves.out_of_patience())
        return self._moves.next_transfers()

    def take_in_transfer(self, result: TransferResult) -> None:
        """A transfer has ended."""
        assert self._moves is not None
        self._bring_back(self._moves.take_in(result))

    def _bring_back(self, requests: list[Request]) -> None:
        """Requests that wait for no blocks any more stand in the queue again, where they stood."""
        for request in requests:
            request.move_to(RequestStatus.PREEMPTED if request.last_step_id else RequestStatus.WAITING)
            self.waiting.push(request)

    def stats(self) -> SchedulerStats:
        cache, host = self.cache, self.cache.tree.host
        num_loading = 0 if self._moves is None else len(self._moves.waiting)
        used, cached = cache.num_used_blocks, cache.num_cached_blocks
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + num_loading,
            num_loading=num_loading,
            num_plans_in_flight=len(self._in_flight),
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_blocks - used - cached,
            num_cached_blocks=cached,
            num_used_blocks=used,
            num_host_blocks=0 if host is None else host.num_units,
            num_used_host_blocks=0 if host is None else host.num_copies,
            totals=msgspec.structs.replace(
                self.counters, num_finished_requests=dict(self.counters.num_finished_requests)
            ),
        )

    # Choosing

    def _preempt_until_decodes_fit(self) -> bool:
        """Preempt until each decode can have the block it may need; whether any had to be."""
        decodes, cache = self._decodes, self.cache
        if cache.reserve(len(decodes)):
            return False
        preempted = False
        while not cache.reserve(sum(r.num_launched_tokens == r.table.num_token_slots for r in decodes)):
            self._make_way()
            preempted = True
        return preempted

    def _make_way(self) -> None:
        """Preempt the request whose preemption costs least.

        One that runs alone always fits, but its blocks may be strewn over slabs that other groups lack: then it begins
        anew, in blocks that lie together.
        """
        victim = self._cheapest_to_preempt()
        if victim is None:
            (victim,) = self.running
            victim.is_cold = True
        self._preempt(victim)

    def _cheapest_to_preempt(self) -> Request | None:
        """The running request whose preemption costs least; never the first in policy order, so that one always ends.

        A covered one costs nothing, as its results are on their way. Then the least important, then the one with the
        fewest tokens to recompute.
        """
        first = min(self.running, key=self.policy.key)
        return min(
            (request for request in self.running if request is not first),
            key=lambda r: (not r.is_covered, self.policy.level(r), r.num_launched_tokens, -r.arrival),
            default=None,
        )

    def _schedule_prefills(self, step: Step, num_decodes: int, *, may_admit: bool) -> int:
        """Running prefills and waiting requests in one policy order, within the budget; tokens scheduled."""
        if not self._prefills and not self.waiting:
            return 0
        if self.limits.capacity_policy == "STATIC_BATCH" and self.running:
            may_admit = False
        prefills = sorted(self._prefills, key=self.policy.key, reverse=True)
        backlog = self.waiting.num_tokens + sum(r.num_known_tokens - r.num_launched_tokens for r in prefills)
        num_left, depth = self.limits.prefill_budget(num_decodes, len(prefills) + len(self.waiting), backlog)
        num_scheduled = 0
        while num_left > 0:
            waiting = self._first_waiting() if may_admit else None
            if waiting is not None and (not prefills or self.policy.key(waiting) < self.policy.key(prefills[-1])):
                is_admitted = self._admit(step, waiting, num_left)
                request = waiting
                if not is_admitted:
                    # One set aside, or loading, makes way for the next; nobody overtakes one that lacks room.
                    may_admit = waiting is not self.waiting.peek()
                    continue
            elif prefills:
                request = prefills.pop()
            else:
                break
            start = request.num_launched_tokens
            num_tokens = self._run_chunk(step, request, tokens_within(num_left, start, depth))
            num_left -= cost(num_tokens, start, depth)
            num_scheduled += num_tokens
        self.waiting.bring_back()
        return num_scheduled

    def _run_chunk(self, step: Step, request: Request, budget: int) -> int:
        """Run what the budget and the blocks allow of a prefill; tokens scheduled.

        None for want of blocks can only be while decodes hold what it was promised; they go on, and end.
        """
        start = request.num_launched_tokens
        wanted = self.limits.chunk_len(request.num_known_tokens - start, budget)
        fits = self.cache.num_tokens_that_fit(request.table, start + wanted) - start
        num_tokens = self.limits.chunk_len(wanted, fits)
        if num_tokens > 0:
            step.run_chunk(request, num_tokens)
            self._sort_in(request)
        return num_tokens

    def _sort_in(self, request: Request) -> None:
        """Note what a prefill of which a chunk was launched has left to run."""
        self._prefills.pop(request, None)
        if request.is_covered:
            return
        if request.num_known_tokens - request.num_launched_tokens == 1:
            request.count_plain_tokens()
            self._decodes[request] = request.row
        else:
            self._prefills[request] = None

    # Letting in and pushing back

    def _first_waiting(self) -> Request | None:
        """The next to let in; None where nobody waits, no row is free, or it is known that the first cannot run yet."""
        request = self.waiting.peek() if self._free_rows else None
        if request is None or self._denied == (request, self.cache.num_releases):
            return None
        # A preempted request's next tokens may still be in flight. Nobody overtakes it meanwhile.
        return request if request.last_step_id <= self._last_updated_step_id else None

    def _admit(self, step: Step, request: Request, budget: int) -> bool:
        """Give the first waiting request a row and blocks for its first chunk; False: no room, and nothing changed."""
        use_cache = not request.is_owed_prompt_logprobs and not request.is_cold
        spare = self.limits.watermark if self.running else 0.0
        promised = self.limits.num_promised_tokens(request)
        if self._moves is not None and use_cache and self._moves.begin(request, promised, spare=spare):
            self.waiting.pop()
            request.move_to(RequestStatus.LOADING)
            return False
        table = self.cache.open(request.token_ids, request.cache_key, promised, spare=spare, use_cache=use_cache)
        if table is None and use_cache and not self.running and not self.is_moving_blocks:
            # What it found lies strewn over slabs that other groups lack.
            use_cache = False
            table = self.cache.open(request.token_ids, request.cache_key, promised, spare=spare, use_cache=use_cache)
        if table is None:
            self._denied = (request, self.cache.num_releases)
            return False
        num_cached = table.num_cached_tokens
        num_tokens = self.limits.chunk_len(request.num_known_tokens - num_cached, budget)
        awaits = use_cache and self._awaits_others(request, table)
        if num_tokens == 0 or awaits:
            self.cache.close(table, request.token_ids, 0)
            if awaits:
                self.waiting.set_aside(request)
            return False
        self.cache.extend(table, num_cached + num_tokens)
        self.waiting.pop()
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_cached
        request.move_to(RequestStatus.RUNNING)
        request.is_cold = request.was_looked_up = False
        request.num_loads = 0
        request.row = self._free_rows.pop()
        request.table = table
        request.num_computed_tokens = request.num_launched_tokens = num_cached
        self.running[request] = self._prefills[request] = self._computing[request] = None
        self.counters.num_prefix_query_tokens += len(request.token_ids) if use_cache else 0
        self.counters.num_prefix_hit_tokens += num_cached
        step.admit(request)
        return True

    def _awaits_others(self, request: Request, table: BlockTable) -> bool:
        """Whether much of what a request lacks is being computed for another: then it waits, and finds it cached."""
        if not self._computing or not self.cache.enable_block_reuse:
            return False
        size, start = self.cache.tokens_per_block, len(table.nodes) * self.cache.tokens_per_block
        level = self.policy.level(request)
        mine, num_lacking = request.token_ids, len(request.token_ids) - table.num_cached_tokens
        for other in self._computing:
            if other.table.node is not table.node or self.policy.level(other) < level:
                continue
            end = min(len(mine) - 1, other.num_prompt_tokens) // size * size
            shared = start
            while shared < end and mine[shared : shared + size] == other.token_ids[shared : shared + size]:
                shared += size
            num_saved = shared - table.num_cached_tokens
            if num_saved > 0 and (num_saved >= WORTH_A_WAIT or 2 * num_saved >= num_lacking):
                return True
        return False

    def _preempt(self, request: Request) -> None:
        """Push a running request back to the front of its level; it will compute again what the cache has lost."""
        request.move_to(RequestStatus.PREEMPTED)
        self._release(request, trusted=True)
        request.last_step_id = self.counters.num_steps
        request.num_computed_tokens = request.num_launched_tokens = 0
        self.waiting.push(request)
        self.counters.num_preemptions += 1

    def _end(self, request: Request, status: RequestStatus) -> None:
        """The one way out, from any state."""
        trusted = status is not RequestStatus.FINISHED_ERROR
        request.move_to(status)
        if request.table is not CLOSED:
            self._release(request, trusted=trusted)
        else:
            if self._moves is not None and request in self._moves.waiting:
                self._moves.forget(request)
            else:
                self.waiting.remove(request)
            if not trusted:
                self.cache.discard(request.token_ids, request.cache_key)
        del self._requests[request.request_id]
        self.counters.num_finished_requests[status.value] += 1

    def _release(self, request: Request, *, trusted: bool) -> None:
        """Take away blocks and row. Both may be handed out in the very next plan."""
        if trusted:
            self.cache.close(request.table, request.token_ids, request.num_computed_tokens, request.retention_wish)
        else:
            self.cache.close_untrusted(request.table)
        request.table = CLOSED
        del self.running[request]
        self._decodes.pop(request, None)
        self._prefills.pop(request, None)
        self._computing.pop(request, None)
        self._newly_freed_rows.append(request.row)
        self._free_rows.append(request.row)
        request.row = -1

    # Taking in a result

    def _take_in_decodes(
        self, plan: SchedulerOutput, requests: list[Request], output: ModelOutput, deltas: list[RequestDelta]
    ) -> None:
        """Add a token to each decode's request; what is more than that, `_take_in` does.

        requests: of the plan's rows. deltas: gets what is new.
        """
        running, size = RequestStatus.RUNNING, self.cache.tokens_per_block
        special = {*output.errors, *output.logprobs, *output.prompt_logprobs}
        for place, (_, request, token_id) in enumerate(zip(plan.decode_rows, requests, output.token_ids, strict=False)):
            token_ids = request.token_ids
            if (
                request.status is not running
                or len(token_ids) + 1 >= request.max_total_tokens
                or token_id in request.stop_token_ids
                or place in special
            ):
                row = ScheduledRow(plan.decode_rows[place], 1, True, plan.decode_starts[place])
                self._take_in(request, row, [token_id], place, output, deltas)
                continue
            token_ids.append(token_id)
            request.num_computed_tokens = computed = request.num_computed_tokens + 1
            if computed % size == 0:
                self.cache.commit(request.table, token_ids, computed, request.retention_wish)
            num_prompt, num_cached = request.num_prompt_tokens, request.num_cached_tokens
            deltas.append(RequestDelta(request.request_id, [token_id], None, None, None, None, num_prompt, num_cached))
            self.counters.num_output_tokens += 1

    def _take_in(
        self,
        request: Request,
        row: ScheduledRow,
        token_ids: list[int],
        place: int,
        output: ModelOutput,
        deltas: list[RequestDelta],
    ) -> None:
        """Add one row's result to its request. Of a preempted request the tokens count, its blocks are gone."""
        is_running = request.status is RequestStatus.RUNNING
        if not is_running and request.is_finished:
            return
        error = output.errors.get(place)
        if error is not None or (row.samples and not token_ids):
            deltas.append(self._fail(request, error or "the worker returned no token"))
            return
        if is_running:
            request.num_computed_tokens += row.num_tokens
        status: RequestStatus | None = None
        num_new = 0
        for token_id in token_ids:
            request.token_ids.append(token_id)
            num_new += 1
            status = check_stop(request)
            if status is not None:
                break
        if is_running and request.num_computed_tokens % self.cache.tokens_per_block < row.num_tokens:
            self.cache.commit(request.table, request.token_ids, request.num_computed_tokens, request.retention_wish)
        if is_running and request.num_computed_tokens >= request.num_prompt_tokens:
            self._computing.pop(request, None)
        prompt_logprobs = _unseen_prompt_logprobs(request, row, output.prompt_logprobs.get(place))
        if status is not None:
            self._end(request, status)
        elif num_new == 0 and prompt_logprobs is None:
            return
        logprobs = output.logprobs.get(place)
        deltas.append(
            RequestDelta(
                request_id=request.request_id,
                new_token_ids=token_ids[:num_new],
                finish_reason=None if status is None else status.value,
                stop_reason=None if status is None else stop_reason(request),
                logprobs=None if logprobs is None else logprobs[:num_new],
                prompt_logprobs=prompt_logprobs,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
            )
        )
        self.counters.num_output_tokens += num_new

    def _fail(self, request: Request, error: str) -> RequestDelta:
        self._end(request, RequestStatus.FINISHED_ERROR)
        return RequestDelta(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=RequestStatus.FINISHED_ERROR.value,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
        )

    # Checking

    def check_invariants(self) -> None:
        """Rows, blocks and requests are each where their request's status says, exactly once."""
        tables = [request.table for request in self.running]
        self.cache.check_invariants(tables)
        loading: set[Request] = set()
        if self._moves is not None:
            self._moves.check_invariants()
            loading = set(self._moves.waiting)
        assert all(request.status is RequestStatus.LOADING for request in loading)
        rows = [request.row for request in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_batch_size))
        assert {*self.running, *self.waiting, *loading} == set(self._requests.values())
        assert len(self.running) + len(self.waiting) + len(loading) == len(self._requests)
        assert self._decodes.keys() | self._prefills.keys() <= self.running.keys()
        assert not self._decodes.keys() & self._prefills.keys()
        for request in self.running:
            num_left = request.num_known_tokens - request.num_launched_tokens
            assert request.status is RequestStatus.RUNNING
            assert (request in self._prefills) == (num_left > 1)
            assert (request in self._decodes) == (num_left == 1 and not request.is_covered)
            if request in self._decodes:
                assert self._decodes[request] == request.row
                assert request.num_plain_tokens == min(request.table.num_token_slots, request.max_total_tokens - 2)
            assert request.num_computed_tokens <= request.num_launched_tokens <= request.num_known_tokens
            assert request.num_launched_tokens <= request.table.num_token_slots
        for request in self.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.table is CLOSED and request.row == -1
            assert request.num_computed_tokens == request.num_launched_tokens == 0


def _unseen_prompt_logprobs(
    request: Request, row: ScheduledRow, scores: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    """The chunk's prompt log-probabilities but for those passed on before a preemption."""
    if not scores:
        return None
    unseen = scores[max(0, request.num_prompt_logprobs - row.start) :]
    request.num_prompt_logprobs += len(unseen)
    return unseen or None
