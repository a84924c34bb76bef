# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, and traces asked for by a front end."""

import asyncio
import time

import pytest

from headrace.engine.step_times import PARTS, StepTimes
from headrace.engine.step_trace import NUM_SKIPPED, StepTrace
from headrace.errors import EngineError
from headrace.sampling_params import SamplingParams


class FakeTracer:
    def __init__(self):
        self.log = []

    def start(self):
        self.log.append("start")

    def mark(self):
        self.log.append("mark")

    def stop(self, num_steps):
        self.log.append(f"stop {num_steps}")
        return {"num_steps": num_steps}


def test_each_part_gets_the_time_since_the_last():
    times = StepTimes()
    times.start()
    time.sleep(0.02)
    times.end_of("schedule")
    times.end_of("launch")
    time.sleep(0.01)
    times.start()
    times.end_of("wait")
    assert set(times.seconds) == set(PARTS)
    assert 0.02 <= times.seconds["schedule"] < 0.2
    assert times.seconds["launch"] + times.seconds["wait"] < 0.005


def test_a_trace_skips_the_first_steps_and_counts_the_rest():
    tracer, answers = FakeTracer(), []
    trace = StepTrace(tracer, StepTimes(), 100, 3, answers.append)
    ended = [trace.after_step(100 + done, True) for done in range(1, NUM_SKIPPED + 4)]
    assert ended == [False] * (NUM_SKIPPED + 2) + [True]
    assert tracer.log == ["start", "mark", "stop 3"]
    assert answers[0]["num_steps"] == 3 and set(answers[0]["host_ms_per_step"]) == set(PARTS)


def test_a_trace_ends_when_there_is_nothing_left_to_do():
    tracer, answers = FakeTracer(), []
    trace = StepTrace(tracer, StepTimes(), 0, 50, answers.append)
    assert not trace.after_step(NUM_SKIPPED, True)
    assert not trace.after_step(NUM_SKIPPED + 1, True)
    assert trace.after_step(NUM_SKIPPED + 2, False)
    assert answers[0]["num_steps"] == 2
    idle = StepTrace(tracer, StepTimes(), 7, 50, answers.append)
    assert idle.after_step(7, False)
    assert answers[1]["num_steps"] == 0


def test_a_front_end_asks_for_a_trace(engine, run):
    async def main():
        async with engine("TracedWorker") as llm:
            streams = [
                asyncio.ensure_future(
                    llm.generate([1, 2, 3 + i], SamplingParams(max_tokens=400, ignore_eos=True)).final()
                )
                for i in range(2)
            ]
            await asyncio.sleep(0)
            first = asyncio.ensure_future(llm.trace(20))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="a trace is running already"):
                await llm.trace(5)
            values = await first
            assert values["num_steps"] == 20 and values["traced"] is True
            assert values["host_ms_per_step"]["wait"] >= 0
            await asyncio.gather(*streams)
            # With nothing to do it ends at once.
            assert (await asyncio.wait_for(llm.trace(5), 5))["num_steps"] == 0

    run(main())


def test_the_counters_hold_the_times_and_the_memory(engine, run):
    async def main():
        async with engine() as llm:
            before = await llm.get_stats()
            await llm.generate([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)).final()
            after = await llm.get_stats()
            assert after["memory"] == {"peak_bytes": 1 << 20, "total_bytes": 1 << 30}
            assert after["num_reconciled_steps"] - before["num_reconciled_steps"] >= 30
            for part in ("schedule", "launch", "update"):
                assert after["step_times_s"][part] > before["step_times_s"][part]
            spent = sum(after["step_times_s"].values()) - sum(before["step_times_s"].values())
            assert 0 < spent < 10

    run(main())
