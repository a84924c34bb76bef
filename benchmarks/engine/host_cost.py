# SPDX-License-Identifier: Apache-2.0
"""What a step costs the host, by part and number of rows; no device takes part.

    python -m benchmarks.engine.host_cost [--rows 1,8,64,256,1024,2048] [--loads greedy,sampled,closed] [--steps 100]
        [--report_json FILE]

The scheduler and the host's half of the worker are the real ones; in place of the device every row gets a token. Loads:
`greedy` and `sampled` (temperature 0.8, top_p 0.95) decode; `closed` is a closed loop of 1,024 tokens in and 256 out,
where requests end, come and have their prompts computed beside the decodes. Parts: `intake` takes in new requests,
`schedule` makes the plan, `stage` and `pack` its words for the device, `finish` the model output, `update` reconciles
it, `give` makes the message to the front end. Medians in microseconds, and the 99th percentile of all parts together;
a graph's launch and two copies come on top.
"""

import argparse
import json
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import torch

from benchmarks.record import provenance
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.limits import SchedulerLimits
from headrace.core.output import SchedulerOutput
from headrace.core.padded_sizes import PaddedSizes, decode_sizes, mixed_sizes
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.engine.garbage import IdleCollector
from headrace.engine.ipc import Outputs, encode
from headrace.worker.input_batch import InputBatch, StagedStep
from headrace.worker.request_state import RequestState
from headrace.worker.step_result import HostTokens, PendingOutput, StepResult
from headrace.worker.upload import StepWords

PARTS = ("intake", "schedule", "stage", "pack", "finish", "update", "give")
LOADS = {
    "greedy": SamplingSpec(temperature=0.0),
    "sampled": SamplingSpec(temperature=0.8, top_p=0.95),
    "closed": SamplingSpec(temperature=0.0),
}
INPUT_LEN, OUTPUT_LEN = 1024, 256
BLOCK, VOCAB, MAX_NUM_TOKENS = 32, 150_000, 8192
DEVICE = torch.device("cpu")


class HostLoop:
    """One engine's host half, a step at a time."""

    def __init__(self, rows: int, load: str, num_steps: int) -> None:
        """num_steps: how many are to be timed; requests that do not come and go last as long."""
        self.rows = rows
        self.is_closed = load == "closed"
        self.spec = LOADS[load]
        longest = INPUT_LEN + OUTPUT_LEN + 4 * num_steps + rows
        max_blocks = longest // BLOCK + 2
        limits = SchedulerLimits(rows, MAX_NUM_TOKENS, MAX_NUM_TOKENS, longest, adapts_prefill=True)
        self.scheduler = Scheduler(limits, KVCacheManager(CacheLayout.plain((rows + 2) * max_blocks), BLOCK))
        self.state = RequestState(rows, longest, [max_blocks], DEVICE)
        self.batch = InputBatch(self.state, MAX_NUM_TOKENS, BLOCK, VOCAB)
        self.sizes = PaddedSizes(rows, decode_sizes(rows), mixed_sizes(MAX_NUM_TOKENS))
        self.num_added = 0
        self.longest = longest
        self.to_add = [self.new_request() for _ in range(rows)]

    def new_request(self) -> Request:
        """One whose prompt nobody has had; the lengths differ, so that blocks fill up in different steps."""
        index = self.num_added
        self.num_added += 1
        prompt_len = INPUT_LEN if self.is_closed else 8 + index % BLOCK
        prompt = [(index * 7919 + i * 104_729) % VOCAB for i in range(prompt_len)]
        # The first ones of a closed loop end at different times, as those after them then do.
        max_tokens = 1 + (index * OUTPUT_LEN) // self.rows if index < self.rows else OUTPUT_LEN
        max_tokens = max_tokens if self.is_closed else self.longest - prompt_len
        spec = SamplingSpec(self.spec.temperature, top_p=self.spec.top_p, max_tokens=max_tokens)
        return Request(f"{index:032x}", prompt, spec)

    def step(self) -> tuple[SchedulerOutput, list[float]]:
        """One step: the plan, and when each part ended, the beginning first."""
        marks = [time.perf_counter()]
        for request in self.to_add:
            self.scheduler.add_request(request)
        marks.append(time.perf_counter())
        plan = self.scheduler.schedule()
        assert plan is not None, "requests last as long as the loop"
        marks.append(time.perf_counter())
        words = StepWords()
        self.state.stage(plan, words)
        staged = self.batch.stage(plan, words, self.sizes.of_body)
        marks.append(time.perf_counter())
        words.pack()
        marks.append(time.perf_counter())
        pending = self.device(plan, staged)
        not_timed = time.perf_counter() - marks[-1]
        output = pending.wait()
        marks.append(time.perf_counter() - not_timed)
        deltas = self.scheduler.update(plan, output)
        marks.append(time.perf_counter() - not_timed)
        encode([Outputs(deltas)])
        marks.append(time.perf_counter() - not_timed)
        self.to_add = [self.new_request() for delta in deltas if delta.finish_reason is not None]
        return plan, marks

    @staticmethod
    def device(plan: SchedulerOutput, staged: StagedStep) -> PendingOutput:
        """What comes of a step: a token for every row that samples."""
        result = StepResult(sampling=staged.sampling)
        if staged.sampling is not None:
            result.token_ids = HostTokens(torch.full((len(staged.sampling.places),), 7))
        future: Future[StepResult] = Future()
        future.set_result(result)
        return PendingOutput(plan, future)


def measure(rows: int, load: str, num_steps: int) -> dict[str, float]:
    """Microseconds of each part of a step with `rows` requests, once all of them decode."""
    loop = HostLoop(rows, load, num_steps)
    is_warm = False
    while not is_warm:
        plan, _ = loop.step()
        is_warm = loop.num_added > 2 * rows if loop.is_closed else plan.num_tokens == rows == len(plan.scheduled)
    IdleCollector()  # As the core's process has.
    times: dict[str, list[float]] = {part: [] for part in (*PARTS, "all")}
    for _ in range(num_steps):
        _, marks = loop.step()
        for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
            times[part].append(1e6 * (end - begin))
        times["all"].append(1e6 * (marks[-1] - marks[0]))
    found = {part: quantile(values, 0.5) for part, values in times.items()}
    return found | {"p99": quantile(times["all"], 0.99)}


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    """Measure, print a table for each load, save the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,256,512,1024,2048")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--report_json", default=None)
    args = parser.parse_args()
    report: dict[str, dict[str, dict[str, float]]] = {}
    for load in args.loads.split(","):
        report[load] = {}
        for rows in args.rows.split(","):
            parts = report[load][rows] = measure(int(rows), load, args.steps)
            if len(report[load]) == 1:
                sys.stdout.write(f"\n{load:>9} rows" + "".join(f"{part:>10}" for part in parts) + "  (us)\n")
            sys.stdout.write(f"{rows:>14}" + "".join(f"{value:>10.0f}" for value in parts.values()) + "\n")
            sys.stdout.flush()
    if args.report_json:
        record = {"benchmark": "host_cost", "microseconds": report} | provenance()
        Path(args.report_json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
