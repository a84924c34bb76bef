# SPDX-License-Identifier: Apache-2.0
"""A worker without a model: it carries plans out on rows and an arena of its own, and checks each KV it reads.

The KV of a position is a chained hash of the tokens up to it (and of the request's seed, which the tests use as its
salt), so a wrong block, a wrong position, a late write into somebody's block or a wrong token shows at once. The next
token is a function of the last KV: outputs cannot depend on batching, chunking, caching or preemption unless
something is wrong.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from event_mirror import EventMirror
from simulated_transfers import Content, SimulatedTransfers

from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.kv_events import EventLog
from headrace.core.output import AdmittedRequest, ModelOutput, RequestDelta, SchedulerOutput, TokenLogprobs
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.core.transfer import Transfer

VOCAB_SIZE = 997
EOS = 5


def next_kv(kv: int, token_id: int) -> int:
    return hash((kv, token_id, 11))


def next_token(kv: int) -> int:
    return (kv >> 7) % VOCAB_SIZE


def plain_run(prompt: list[int], sampling: SamplingSpec, max_seq_len: int) -> tuple[list[int], str]:
    """What a request must give, whatever happens around it: its output and finish reason."""
    kv = sampling.seed
    for token_id in prompt:
        kv = next_kv(kv, token_id)
    output: list[int] = []
    stops = {*sampling.stop_token_ids, *sampling.eos_token_ids}
    while True:
        output.append(next_token(kv))
        if output[-1] in stops and len(output) > sampling.min_tokens:
            return output, "stop"
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= max_seq_len:
            return output, "length"
        kv = next_kv(kv, output[-1])


@dataclass
class Row:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: list[list[int]]
    sampling: SamplingSpec
    is_broken: bool = False

    def kv_at(self, position: int) -> int:
        kv = self.sampling.seed
        for token_id in self.token_ids[: position + 1]:
            kv = next_kv(kv, token_id)
        return kv


@dataclass
class Result:
    """What came of one row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


def output_of(plan: SchedulerOutput, results: list[Result], *, counts: bool = False) -> ModelOutput:
    """The results of a plan's rows, in their order. counts: say how many tokens each has, though it is one each."""
    lengths = [len(result.token_ids) for result in results]
    return ModelOutput(
        plan.step_id,
        [token_id for result in results for token_id in result.token_ids],
        None if lengths == [row.samples for row in plan.scheduled] and not counts else lengths,
        {place: result.logprobs for place, result in enumerate(results) if result.logprobs is not None},
        {place: result.prompt_logprobs for place, result in enumerate(results) if result.prompt_logprobs is not None},
        {place: result.error for place, result in enumerate(results) if result.error is not None},
    )


class SimulatedWorker:
    """Carries plans out in launch order, as late as `wait` is called."""

    def __init__(self, layout: CacheLayout, tokens_per_block: int, max_batch_size: int) -> None:
        self.size = tokens_per_block
        self.max_batch_size = max_batch_size
        # One arena of slabs, as the real one is: who writes to a slab of another group is found out.
        slab = 16 * max(group.blocks_per_slab for group in layout.groups) * tokens_per_block
        self.memory = [0] * (layout.num_slabs * slab)
        self.strides = [slab // group.blocks_per_slab for group in layout.groups]
        self.windows = [group.window for group in layout.groups]
        self.rows: dict[int, Row] = {}
        self.launched: deque[SchedulerOutput] = deque()
        self.num_launched = self.num_carried_out = 0
        self.rows_to_break: set[int] = set()
        """Rows whose next step writes garbage and reports an error."""
        self.counts = False
        """Whether results say how many tokens each row has."""

    def launch(self, plan: SchedulerOutput) -> None:
        self.launched.append(plan)
        self.num_launched += 1

    def read_block(self, group: int, block_id: int) -> list[int]:
        start = self._at(group, block_id, 0)
        return self.memory[start : start + self.size]

    def write_block(self, group: int, block_id: int, content: list[int]) -> None:
        start = self._at(group, block_id, 0)
        self.memory[start : start + self.size] = content

    def wait(self) -> tuple[SchedulerOutput, ModelOutput]:
        """Carry out the oldest launched plan."""
        plan = self.launched.popleft()
        self._update_rows(plan)
        for scheduled in plan.scheduled:
            self._write(self.rows[scheduled.row], scheduled.num_tokens, scheduled.start, scheduled.row)
        # All writes of a step come before its reads, as in a layer of a real model.
        outputs = [self._read(self.rows[each.row], each.num_tokens, each.samples) for each in plan.scheduled]
        self.num_carried_out += 1
        return plan, output_of(plan, outputs, counts=self.counts)

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for row in plan.freed_rows:
            del self.rows[row]
        for admitted in plan.admitted:
            assert admitted.row not in self.rows and 0 <= admitted.row < self.max_batch_size
            self.rows[admitted.row] = self._row(admitted)
        for group, source, destination in plan.cache_plan.device_copies:
            self.write_block(group, destination, self.read_block(group, source))
        for append in plan.appended_blocks:
            table = self.rows[append.row].tables[append.group]
            assert append.start == len(table), "a block table with a hole"
            table += append.block_ids
        lengths = [each.num_tokens for each in plan.scheduled]
        assert lengths and len({each.row for each in plan.scheduled}) == len(lengths)
        assert lengths == [n for n in lengths if n == 1] + [n for n in lengths if n > 1], "single tokens come first"
        assert len(plan.decode_rows) == len(plan.decode_starts) and plan.num_rows == len(lengths)

    def _at(self, group: int, block_id: int, slot: int) -> int:
        """Where in memory a slot of a block is."""
        return block_id * self.strides[group] + slot

    @staticmethod
    def _row(admitted: AdmittedRequest) -> Row:
        assert admitted.num_computed_tokens < len(admitted.token_ids)
        return Row(
            list(admitted.token_ids),
            admitted.num_prompt_tokens,
            admitted.num_computed_tokens,
            [list(block_ids) for block_ids in admitted.block_ids],
            admitted.sampling,
        )

    def _write(self, row: Row, num_tokens: int, start: int, index: int) -> None:
        assert row.num_computed_tokens == start
        assert start + num_tokens <= len(row.token_ids), "more tokens than the device knows"
        row.is_broken |= index in self.rows_to_break
        self.rows_to_break.discard(index)
        kv = row.kv_at(start - 1)
        for position in range(start, start + num_tokens):
            kv = next_kv(kv, row.token_ids[position])
            for group, table in enumerate(row.tables):
                block_id = table[position // self.size]
                self.memory[self._at(group, block_id, position % self.size)] = -1 if row.is_broken else kv
        row.num_computed_tokens += num_tokens

    def _read(self, row: Row, num_tokens: int, samples: bool) -> Result:
        end = row.num_computed_tokens
        if row.is_broken:
            row.token_ids += [0] * samples
            return Result([-1] * samples, error="broken")
        kv = row.sampling.seed
        for position, token_id in enumerate(row.token_ids[:end]):
            kv = next_kv(kv, token_id)
            for group, table in enumerate(row.tables):
                window = self.windows[group]
                if window is not None and position <= end - num_tokens - window:
                    continue
                block_id = table[position // self.size]
                found = self.memory[self._at(group, block_id, position % self.size)]
                assert found == kv, f"position {position}: the KV in block {block_id} of group {group} is not its own"
        assert samples == (end == len(row.token_ids))
        new = [next_token(kv)] if samples else []
        row.token_ids += new
        logprobs = None if row.sampling.logprobs is None else [_logprobs(each) for each in new]
        return Result(new, logprobs, self._prompt_logprobs(row, end - num_tokens, end))

    @staticmethod
    def _prompt_logprobs(row: Row, start: int, end: int) -> list[TokenLogprobs] | None:
        if row.sampling.prompt_logprobs is None:
            return None
        return [_logprobs(token_id) for token_id in row.token_ids[start + 1 : min(end + 1, row.num_prompt_tokens)]]


def _logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs([token_id], [-1.0], [1])


class Engine:
    """A scheduler and a simulated worker with `depth` plans in flight at most; collects what each request gives."""

    def __init__(self, scheduler: Scheduler, depth: int = 1) -> None:
        cache = scheduler.cache
        self.scheduler = scheduler
        self.depth = depth
        self.worker = SimulatedWorker(cache.layout, cache.tokens_per_block, scheduler.limits.max_batch_size)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.last_delta: dict[str, RequestDelta] = {}
        self.silenced: set[str] = set()
        """Requests of which nothing may be heard any more."""
        self.plans: list[SchedulerOutput] = []
        self.mirror: EventMirror | None = None
        self.transfers: SimulatedTransfers | None = None

    def add_host(
        self,
        num_blocks: int,
        min_priority: int = 35,
        rng: random.Random | None = None,
        fails: Callable[[Transfer, int], bool] = lambda transfer, index: False,
        store: dict[tuple[bytes, int], Content] | None = None,
    ) -> None:
        """From here on blocks move. store: storage below the host."""
        self.scheduler.add_host(min_priority, has_store=store is not None)
        self.transfers = SimulatedTransfers(self.worker, num_blocks, rng, fails, store)
        self.scheduler.set_host_blocks(num_blocks)

    def move_blocks(self) -> None:
        """What an engine does between launches: begin transfers, and take in those that have ended."""
        if self.transfers is not None:
            for transfer in self.scheduler.next_transfers():
                self.transfers.submit(transfer)
            for result in self.transfers.poll():
                self.scheduler.take_in_transfer(result)

    def follow_events(self) -> None:
        """From here on `check_events` compares what readers of events know with what the cache has."""
        self.scheduler.cache.tree.events = log = EventLog(100_000, 1)
        self.mirror = EventMirror(log)

    def check_events(self) -> None:
        tree = self.scheduler.cache.tree
        if self.mirror is not None:
            nodes = [node for node in tree.nodes() if not node.is_detached]
            self.mirror.check({tree.hash_of(node): (int(not node.is_on_device), node.priority) for node in nodes})

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.prompt_logprobs[request.request_id] = []
        return request

    def abort(self, *request_ids: str) -> None:
        self.scheduler.abort(request_ids)
        self.silenced |= set(request_ids)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        self.scheduler.finish(request_id, num_output_tokens)
        self.silenced.add(request_id)

    def launch(self) -> SchedulerOutput | None:
        """One `schedule`, launched."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_budget(plan)
            self.plans.append(plan)
            self.worker.launch(plan)
        return plan

    def check_budget(self, plan: SchedulerOutput) -> None:
        limits = self.scheduler.limits
        assert 0 < plan.num_tokens <= limits.max_num_tokens
        assert len(plan.scheduled) <= limits.max_batch_size

    def collect(self) -> None:
        """One `update`, of the oldest plan in flight."""
        plan, output = self.worker.wait()
        for delta in self.scheduler.update(plan, output):
            self.take(delta)

    def take(self, delta: RequestDelta) -> None:
        request_id = delta.request_id
        assert request_id not in self.silenced, "something is heard of a request that has ended"
        if delta.finish_reason is not None:
            self.silenced.add(request_id)
        self.outputs[request_id] += delta.new_token_ids
        self.prompt_logprobs[request_id] += [each.token_ids[0] for each in delta.prompt_logprobs or ()]
        self.last_delta[request_id] = delta

    def step(self) -> None:
        """Launch if a plan more may be in flight, and collect when as many are as may be, or when nothing can run."""
        launched = self.launch() is not None
        moves = self.scheduler.is_moving_blocks
        self.move_blocks()
        comes = launched or self.worker.launched or moves
        assert comes or not self.scheduler.has_work(), "nothing runs and nothing will"
        if self.worker.launched and (not launched or len(self.worker.launched) >= self.depth):
            self.collect()

    def run(self, max_steps: int = 10_000) -> int:
        """Until nothing is left; the number of steps it took."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work() and not self.worker.launched and not self.scheduler.is_moving_blocks:
                return num_steps
            self.step()
            self.scheduler.check_invariants()
        raise AssertionError(f"not done after {max_steps} steps: somebody is starved")

    def check_nothing_leaked(self) -> None:
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_used_blocks == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        self.scheduler.check_invariants()

    def check_outputs(self) -> None:
        """Requests that ended by themselves gave what a plain run gives; the others gave the beginning of it."""
        for request_id, request in self.requests.items():
            prompt = request.token_ids[: request.num_prompt_tokens]
            expected, reason = plain_run(prompt, request.sampling, self.scheduler.limits.max_seq_len)
            given = self.outputs[request_id]
            delta = self.last_delta.get(request_id)
            if delta is not None and delta.finish_reason not in (None, "error"):
                assert (given, delta.finish_reason) == (expected, reason)
                assert request.sampling.prompt_logprobs is None or self.prompt_logprobs[request_id] == prompt[1:]
            else:
                assert given == expected[: len(given)]
