# SPDX-License-Identifier: Apache-2.0
"""Workers without a model: output token i of a request is prompt token i modulo the prompt's length.

A core process finds them by name (this folder is put on its path by the `core_options` fixture).
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.config.resolve import DeviceFacts, ResolvedConfig
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.output import ModelOutput, ScheduledRow, SchedulerOutput, TokenLogprobs
from headrace.core.transfer import Transfer, TransferResult
from headrace.errors import ModelLoadError
from headrace.utils.hub import ModelSource

NUM_BLOCKS = 64


def device_facts(device: str) -> DeviceFacts:
    return DeviceFacts(kind="cpu", name="a fake")


def cuda_facts(device: str) -> DeviceFacts:
    """A GPU that nothing runs on."""
    return DeviceFacts(kind="cuda", name="a fake GPU", total_memory=1 << 34, capability=(9, 0))


@dataclass
class Info:
    layout: CacheLayout
    tokens_per_block: int
    max_seq_len: int
    kv_bytes_per_token: int = 1
    num_host_blocks: int = 0
    attn_backend: str = "NONE"
    ledger: list[str] = field(default_factory=lambda: ["nothing"])
    phases: dict[str, float] = field(default_factory=dict)


@dataclass
class Row:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    wants_logprobs: bool
    wants_prompt_logprobs: bool


@dataclass
class Result:
    """What came of one row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


def output_of(plan: SchedulerOutput, results: list[Result]) -> ModelOutput:
    """The results of a plan's rows, in their order."""
    counts = [len(result.token_ids) for result in results]
    return ModelOutput(
        plan.step_id,
        [token_id for result in results for token_id in result.token_ids],
        None if counts == [row.samples for row in plan.scheduled] else counts,
        {place: result.logprobs for place, result in enumerate(results) if result.logprobs is not None},
        {place: result.prompt_logprobs for place, result in enumerate(results) if result.prompt_logprobs is not None},
        {place: result.error for place, result in enumerate(results) if result.error is not None},
    )


class Done:
    def __init__(self, output: ModelOutput) -> None:
        self._output = output

    def wait(self) -> ModelOutput:
        return self._output


class FakeWorker:
    """Answers at once."""

    def __init__(self, config: ResolvedConfig, source: ModelSource) -> None:
        self.config = config
        self.rows: dict[int, Row] = {}
        self.ended: list[TransferResult] = []
        """Transfers, which all succeed at once."""

    def start(self, progress: Callable[[str, int, int], None]) -> Info:
        for done in range(4):
            progress("loading weights", done, 3)
        return Info(CacheLayout.plain(NUM_BLOCKS), self.config.tokens_per_block, self.config.max_seq_len)

    def forward(self, plan: SchedulerOutput) -> None:
        for row in plan.freed_rows:
            del self.rows[row]
        for new in plan.admitted:
            self.rows[new.row] = Row(
                list(new.token_ids),
                new.num_prompt_tokens,
                new.num_computed_tokens,
                new.sampling.logprobs is not None,
                new.sampling.prompt_logprobs is not None,
            )

    def sample(self, plan: SchedulerOutput, masks: None) -> Done:
        return Done(output_of(plan, [self._run(row) for row in plan.scheduled]))

    def transfer(self, transfer: Transfer) -> None:
        self.ended.append(TransferResult(transfer.transfer_id, []))

    def poll_transfers(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return ended

    def num_ready_host_blocks(self) -> int:
        return 0

    def use_idle_time(self) -> bool:
        return False

    def memory(self) -> dict[str, int]:
        return {"peak_bytes": 1 << 20, "total_bytes": 1 << 30}

    def shutdown(self) -> None:
        pass

    def _run(self, scheduled: ScheduledRow) -> Result:
        row = self.rows[scheduled.row]
        first = row.num_computed_tokens
        assert first == scheduled.start, "plans ran out of order"
        row.num_computed_tokens += scheduled.num_tokens
        prompt_logprobs = None
        if row.wants_prompt_logprobs:
            after = row.token_ids[first + 1 : min(row.num_computed_tokens + 1, row.num_prompt_tokens)]
            prompt_logprobs = [logprobs_of(token_id) for token_id in after]
        if not scheduled.samples:
            return Result([], prompt_logprobs=prompt_logprobs)
        assert row.num_computed_tokens == len(row.token_ids)
        token_id = row.token_ids[(len(row.token_ids) - row.num_prompt_tokens) % row.num_prompt_tokens]
        row.token_ids.append(token_id)
        logprobs = [logprobs_of(token_id)] if row.wants_logprobs else None
        return Result([token_id], logprobs, prompt_logprobs)


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs([token_id, (token_id + 1) % 256], [-0.5, -1.5], [1, 2])


class SlowWorker(FakeWorker):
    """Takes 20 ms a step."""

    def sample(self, plan: SchedulerOutput, masks: None) -> Done:
        time.sleep(0.02)
        return super().sample(plan, masks)


class TracedWorker(FakeWorker):
    """Takes a millisecond a step, and has a tracer that records nothing."""

    def sample(self, plan: SchedulerOutput, masks: None) -> Done:
        time.sleep(0.001)
        return super().sample(plan, masks)

    @property
    def tracer(self) -> "FakeTracer":
        return FakeTracer()


class FakeTracer:
    def start(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def stop(self, num_steps: int) -> dict[str, object]:
        return {"num_steps": num_steps, "traced": True}


class SlowToLoad(FakeWorker):
    """Takes a minute to load."""

    def start(self, progress: Callable[[str, int, int], None]) -> Info:
        progress("loading weights", 1, 100)
        time.sleep(60)
        return super().start(progress)


class CannotLoad(FakeWorker):
    def start(self, progress: Callable[[str, int, int], None]) -> Info:
        raise ModelLoadError("tensor model.norm.weight is missing from model.safetensors.")


class CrashesLoading(FakeWorker):
    def start(self, progress: Callable[[str, int, int], None]) -> Info:
        raise RuntimeError("a bug in the loader")


class ExitsLoading(FakeWorker):
    def start(self, progress: Callable[[str, int, int], None]) -> Info:
        os._exit(7)


class CrashesServing(FakeWorker):
    """The device is lost in the fifth step."""

    def sample(self, plan: SchedulerOutput, masks: None) -> Done:
        if plan.step_id == 5:
            raise RuntimeError("the device fell off the bus")
        return super().sample(plan, masks)


class FailsOneRow(FakeWorker):
    """Rows whose prompt begins with token 33 ("!" in the byte tokenizer) fail at their third output token."""

    def _run(self, scheduled: ScheduledRow) -> Result:
        row = self.rows[scheduled.row]
        if row.token_ids[0] == 33 and len(row.token_ids) - row.num_prompt_tokens == 2:
            row.num_computed_tokens += scheduled.num_tokens
            return Result([], error="its logits are not numbers")
        return super()._run(scheduled)


class LateWorker(FakeWorker):
    """A device so late that it begins a step only when its result is waited for; `log` says what came when."""

    def __init__(self, config: ResolvedConfig, source: ModelSource) -> None:
        super().__init__(config, source)
        self.log: list[tuple[str, int]] = []

    def forward(self, plan: SchedulerOutput) -> None:
        self.log.append(("launched", plan.step_id))

    def sample(self, plan: SchedulerOutput, masks: None) -> "LateOutput":  # type: ignore[override]
        return LateOutput(self, plan)

    def compute(self, plan: SchedulerOutput) -> ModelOutput:
        super().forward(plan)
        self.log.append(("computed", plan.step_id))
        return super().sample(plan, None).wait()


class LateOutput:
    """A result that is computed when it is waited for."""

    def __init__(self, worker: LateWorker, plan: SchedulerOutput) -> None:
        self._worker = worker
        self._plan = plan

    def wait(self) -> ModelOutput:
        return self._worker.compute(self._plan)


class TellsKernelCache(FakeWorker):
    """Its ledger is where Triton would put a kernel that is compiled now."""

    def start(self, progress: Callable[[str, int, int], None]) -> Info:
        info = super().start(progress)
        info.ledger = [os.environ.get("TRITON_CACHE_DIR", "")]
        return info
