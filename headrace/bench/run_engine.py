# SPDX-License-Identifier: Apache-2.0
"""`headrace bench throughput` and `latency`: levels of closed-loop load on an engine loaded here."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.bench.ceilings import as_ceilings, find_ceilings
from headrace.bench.dataset import BenchRequest, check_lengths, read_dataset, with_ids
from headrace.bench.hardware import SM_CLOCK, GpuWatch
from headrace.bench.load import Load, TargetGoneError
from headrace.bench.model_shape import shape_of
from headrace.bench.offline import EngineTarget, run_level, settle, trace_level, warm_up
from headrace.bench.plan import INTERRUPTED, Levels, Outputs, Workload
from headrace.bench.report import NOT_REPORTED, Report
from headrace.bench.roofline import Ceilings, Shape
from headrace.bench.screen import Screen
from headrace.bench.shares import roofline_shares, step_split
from headrace.bench.summary import summarize
from headrace.bench.workload import take, units_of
from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.tokenizer import load_tokenizer
from headrace.errors import EngineError, HeadraceError
from headrace.utils.hub import ModelSource, resolve_model
from headrace.utils.machine import nvidia_gpus
from headrace.utils.threads import usable_cores

TRACE_STEPS = {"cuda": 32, "cpu": 0}
MOST_ON_CPU = 8
"""Concurrency of a CPU that is not told any."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to do."""

    kind: str
    """throughput or latency."""
    args: LlmArgs
    workload: Workload
    outputs: Outputs
    levels: tuple[int, ...] | None
    """Requests in flight; None: what the engine can run."""
    warmup: int = 2
    streaming: bool = True
    trace_steps: int | None = None
    """None: chosen by device."""


class EngineRun:
    """One run, from settings to report. Use `run`."""

    def __init__(self, plan: EnginePlan, report: Report, screen: Screen) -> None:
        self._plan = plan
        self._report = report
        self._screen = screen
        args = plan.args
        self._device = "cuda" if args.device != "cpu" and nvidia_gpus() else "cpu"
        self._given: list[BenchRequest] | None = None
        name = plan.workload.dataset
        if name is not None:
            self._given = take(read_dataset(name), plan.workload.num_requests, f"dataset {name}")
        self._source: ModelSource = resolve_model(args.model, args.revision, need_weights=args.load_format != "dummy")
        self._model: ModelConfig = load_model_config(self._source)
        if self._given is not None and any(request.input_ids is None for request in self._given):
            self._given = with_ids(self._given, load_tokenizer(self._source, args).encode)
        limit = self._model.longest_allowed if args.max_seq_len == "auto" else args.max_seq_len
        self._check(limit)
        self._shape: Shape | None = None
        self._ceilings: Ceilings | None = None
        self._vocab_size = self._model.vocab_size

    async def run(self) -> int:
        """Measure; returns the exit code: 1 where something failed, 130 after Ctrl-C."""
        args = self._plan.args
        threads = args.num_threads if args.num_threads != "auto" else usable_cores()
        values = find_ceilings(self._device, threads, self._screen.say, self._plan.outputs.ceilings)
        self._ceilings = as_ceilings(values) if values is not None else None
        llm = AsyncLLM(args.model_copy(update={"skip_tokenizer_init": True}))
        why: str | None = None
        code = 1
        try:
            await llm.start()
            self._describe(llm, values)
            why = await self._measure(llm)
            code = 0 if why is None and not any(level["num_failed"] for level in self._report.levels) else 1
        except asyncio.CancelledError:
            why, code = "stopped by Ctrl-C", INTERRUPTED
        except HeadraceError as error:
            why = error.message
            raise
        finally:
            llm.shutdown()
            self._report.end(why)
        return code

    def _check(self, max_seq_len: int) -> None:
        """Refuse lengths that cannot run. The longest synthetic request stands for all of them."""
        workload = self._plan.workload
        if self._given is not None:
            check_lengths(self._given, max_seq_len, self._model.vocab_size)
            return
        input_len, output_len = workload.lens(self._device)
        check_lengths([BenchRequest("of --input_len", output_len, (0,) * input_len)], max_seq_len, 1)

    def _describe(self, llm: AsyncLLM, ceilings: dict[str, Any] | None) -> None:
        info = llm.info
        self._check(info.max_seq_len)
        self._shape = shape_of(self._model, self._source, info.dtype, info.kv_bytes_per_token)
        engine = msgspec.to_builtins(info)
        self._report.describe(
            info.device,
            model={
                "name": info.model_name,
                "architecture": info.architecture,
                "num_params": self._model.num_params(),
                "weight_bytes": self._shape.weight_bytes,
                "dtype": info.dtype,
                "is_random": self._plan.args.load_format == "dummy",
            },
            engine={name: value for name, value in engine.items() if name not in NOT_REPORTED},
            startup=info.startup,
            settings=self._plan.args.model_dump(mode="json", exclude_defaults=True),
            workload=_describe_workload(self._plan.workload, self._device),
            num_gpus=1,
            ceilings=ceilings,
        )

    async def _measure(self, llm: AsyncLLM) -> str | None:
        """Every level, then their traces; what cut the run short, if anything did."""
        plan = self._plan
        target = EngineTarget(llm, plan.workload.temperature, plan.workload.ignore_eos, plan.streaming)
        concurrencies = plan.levels or (self._usual_concurrency(llm),)
        levels = Levels(plan.workload, self._given, self._device, llm.info.vocab_size)
        try:
            await settle(llm, self._screen.say)
            with GpuWatch(self._device == "cuda") as watch:
                first = levels.requests(0, concurrencies[0])
                if plan.warmup:
                    lens = len(first[0].input_ids or ()), min(first[0].output_tokens, 32)
                    await warm_up(llm, target, plan.warmup, concurrencies[0], *lens)
                for index, concurrency in enumerate(concurrencies):
                    requests = first if index == 0 else levels.requests(index, concurrency)
                    await self._run_level(llm, target, requests, concurrency, watch)
                self._report.values["memory"] = (await llm.get_stats())["memory"]
                await self._trace(llm, concurrencies)
        except (TargetGoneError, EngineError) as error:
            return str(error)
        return None

    def _usual_concurrency(self, llm: AsyncLLM) -> int:
        most = llm.info.max_batch_size
        return most if self._device == "cuda" else min(most, MOST_ON_CPU)

    async def _run_level(
        self,
        llm: AsyncLLM,
        target: EngineTarget,
        requests: Sequence[BenchRequest],
        concurrency: int,
        watch: GpuWatch,
    ) -> None:
        units = units_of(requests)
        load = Load(target, units, [0.0] * len(units), concurrency)
        mark = watch.mark()
        split: dict[str, Any] | None = None
        try:
            work = run_level(target, llm, load)
            before, after = await self._screen.follow(f"concurrency {concurrency}", load, work)
            split = step_split(before, after, load.seconds)
        finally:
            if load.records:
                self._report.add(self._summary(load, requests, concurrency, split, watch.summary(mark)))

    def _summary(
        self,
        load: Load,
        requests: Sequence[BenchRequest],
        concurrency: int,
        split: dict[str, Any] | None,
        gpu: dict[str, Any] | None,
    ) -> dict[str, Any]:
        cold = self._plan.workload.is_meant_cold(requests)
        level = summarize(
            load.records, load.seconds, concurrency=concurrency, is_meant_cold=cold, streaming=self._plan.streaming
        )
        level |= {"num_unfinished": load.num_requests - len(load.records), "request_rate": None}
        if self._shape is not None and self._ceilings is not None:
            clock = gpu[SM_CLOCK]["mean"] if gpu is not None else None
            ceilings = self._ceilings if clock is None else self._ceilings.at_clock(clock)
            level["roofline"] = roofline_shares(self._shape, ceilings, level)
        return level | {"steps": split, "gpu": gpu, "trace": None}

    async def _trace(self, llm: AsyncLLM, concurrencies: Sequence[int]) -> None:
        """After all levels, since a profiler that was once attached may slow what follows."""
        steps = self._plan.trace_steps
        steps = TRACE_STEPS[self._device] if steps is None else steps
        if steps < 1:
            return
        self._screen.say(f"Tracing {steps} decode steps of each level ...")
        for index, (level, concurrency) in enumerate(zip(self._report.levels, concurrencies, strict=False)):
            input_len = max(1, round(level["mean_input_len"]))
            level["trace"] = await trace_level(llm, concurrency, input_len, steps, index)
            self._report.save()


def _describe_workload(workload: Workload, device: str) -> dict[str, Any]:
    input_len, output_len = workload.lens(device)
    synthetic = {} if workload.dataset is not None else {"input_len": input_len, "output_len": output_len}
    return {
        "dataset": workload.dataset,
        "random_seed": workload.random_seed,
        "temperature": workload.temperature,
        "ignore_eos": workload.ignore_eos,
        "warm_cache": workload.warm_cache,
        **synthetic,
    }
