# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs the host, by part and number of rows; no device takes part.

    python -m benchmarks.engine.host_cost [--rows 1,8,64,256,1024,2048] [--steps 60] [--report_json FILE]

The scheduler and the host's half of the worker are the real ones; in place of the device every row gets a token. Parts:
`schedule` makes the plan, `stage` and `pack` its words for the device, `finish` the model output, `update` reconciles
it, `encode` makes the message to the front end. Medians in microseconds; a graph's launch and two copies come on top.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.record import provenance
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.limits import SchedulerLimits
from headrace.core.output import ModelOutput, RowOutput
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.engine.ipc import Outputs, encode
from headrace.worker.input_batch import InputBatch
from headrace.worker.padded_sizes import PaddedSizes, decode_sizes, mixed_sizes
from headrace.worker.request_state import RequestState
from headrace.worker.upload import StepWords

PARTS = ("schedule", "stage", "pack", "finish", "update", "encode")
PROMPT, BLOCK, VOCAB = 100, 32, 150_000


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(rows: int, steps: int) -> dict[str, float]:
    """Microseconds of each part, of steps in which `rows` requests decode."""
    longest = PROMPT + steps + 40
    cache = KVCacheManager(rows * (longest // BLOCK + 2), BLOCK)
    limits = SchedulerLimits(rows, max(8192, rows), 8192, longest + BLOCK)
    scheduler = Scheduler(limits, cache)
    state = RequestState(rows, longest + BLOCK, [longest // BLOCK + 2], torch.device("cpu"))
    batch = InputBatch(state, 8192, BLOCK, VOCAB)
    sizes = PaddedSizes(rows, decode_sizes(rows), mixed_sizes(8192))
    for index in range(rows):
        prompt = [(index * 7919 + i * 104_729) % VOCAB for i in range(PROMPT)]
        spec = SamplingSpec(temperature=0.0, max_tokens=steps + 30)
        scheduler.add_request(Request(f"request-{index}", prompt, spec))
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    while len(times["encode"]) < steps:
        marks = [time.perf_counter()]
        plan = scheduler.schedule()
        assert plan is not None
        marks.append(time.perf_counter())
        words = StepWords()
        state.stage(plan, words)
        staged = batch.stage(plan, words, sizes.of_body)
        marks.append(time.perf_counter())
        words.pack()
        marks.append(time.perf_counter())
        tokens = [7] * len(staged.sampling.places) if staged.sampling is not None else []
        outputs = [RowOutput([])] * len(plan.scheduled)
        if staged.sampling is not None:
            for place, token in zip(staged.sampling.places, tokens, strict=True):
                outputs[place] = RowOutput([token])
        output = ModelOutput(plan.step_id, outputs)
        marks.append(time.perf_counter())
        deltas = scheduler.update(plan, output)
        marks.append(time.perf_counter())
        encode([Outputs(deltas)])
        marks.append(time.perf_counter())
        if len(plan.scheduled) == rows and staged.max_query_len == 1:
            for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
                times[part].append(1e6 * (end - begin))
    found = {part: median(values) for part, values in times.items()}
    return found | {"total": sum(found.values())}


def main() -> None:
    """Measure, print a table, save the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,256,512,1024,2048")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--report_json", default=None)
    args = parser.parse_args()
    report = {rows: measure(rows, args.steps) for rows in map(int, args.rows.split(","))}
    sys.stdout.write("   rows" + "".join(f"{part:>10}" for part in (*PARTS, "total")) + "  (us)\n")
    for rows, parts in report.items():
        sys.stdout.write(f"{rows:>7}" + "".join(f"{value:>10.0f}" for value in parts.values()) + "\n")
    if args.report_json:
        record = {"benchmark": "host_cost", "microseconds": report} | provenance()
        Path(args.report_json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
