# SPDX-License-Identifier: Apache-2.0
"""`headrace bench serve`: levels of open- or closed-loop load on a server that somebody else started."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bench.arrivals import arrival_times
from headrace.bench.ceilings import as_ceilings, find_ceilings
from headrace.bench.dataset import BenchRequest, check_lengths, read_dataset, with_text
from headrace.bench.http_client import HttpError
from headrace.bench.load import Load, TargetGoneError
from headrace.bench.model_shape import shape_of
from headrace.bench.plan import INTERRUPTED, Levels, Outputs, Workload
from headrace.bench.report import NOT_REPORTED, Report
from headrace.bench.roofline import Ceilings, Shape
from headrace.bench.screen import Screen
from headrace.bench.server_target import Endpoint, ServerTarget
from headrace.bench.shares import roofline_shares, step_split
from headrace.bench.summary import summarize
from headrace.bench.workload import Lengths, random_requests, units_of
from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import ConfigError, HeadraceError
from headrace.utils.hub import ModelSource, resolve_model
from headrace.utils.machine import nvidia_gpus
from headrace.utils.threads import usable_cores
from headrace.utils.url import base_url

UNKNOWN_VOCABULARY = 30_000
"""Ids to draw from where nobody says how many there are: every large model's vocabulary has these."""
NUM_OFFSETS = 1 << 20
"""Runs that do not share prompts, though the server may live on between them."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What to do."""

    url: str
    workload: Workload
    outputs: Outputs
    levels: tuple[int, ...] | None
    """Most requests in flight; None: no limit."""
    endpoint: Endpoint = "completions"
    model: str | None = None
    api_key: str | None = None
    model_path: str | None = None
    num_gpus: int = 1
    request_rate: float | None = None
    burstiness: float = 1.0
    warmup: int = 2
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    """What is known of the model behind the server."""

    source: ModelSource | None = None
    model: ModelConfig | None = None
    tokenizer: Tokenizer | None = None
    vocab_size: int = UNKNOWN_VOCABULARY
    max_seq_len: int | None = None
    device: str = "cpu"
    is_ours: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


class ServerRun:
    """One run, from settings to report. Use `run`."""

    def __init__(self, plan: ServerPlan, report: Report, screen: Screen) -> None:
        self._plan = plan
        self._report = report
        self._screen = screen
        workload = plan.workload
        self._given = read_dataset(workload.dataset) if workload.dataset is not None else None
        self._known = _Known()
        if plan.model_path is not None:
            self._look_at(plan.model_path)
        self._target = ServerTarget(
            base_url(plan.url),
            plan.endpoint,
            plan.api_key,
            model=plan.model,
            temperature=workload.temperature,
            ignore_eos=workload.ignore_eos,
            extra=plan.extra_body,
        )
        self._shape: Shape | None = None
        self._ceilings: Ceilings | None = None

    async def run(self) -> int:
        """Measure; returns the exit code: 1 where something failed, 130 after Ctrl-C."""
        why: str | None = "the server could not be reached"
        code = 1
        try:
            info = await self._target.connect()
            if info is not None:
                self._hear(info["engine"])
            self._describe()
            why = await self._measure()
            code = 0 if why is None and not any(level["num_failed"] for level in self._report.levels) else 1
        except asyncio.CancelledError:
            why, code = "stopped by Ctrl-C", INTERRUPTED
        except HeadraceError as error:
            why = error.message
            raise
        finally:
            self._target.close()
            self._report.end(why)
        return code

    def _look_at(self, model_path: str) -> None:
        """The model's small files here: its shapes and its tokenizer."""
        known = self._known
        known.source = resolve_model(model_path, need_weights=False)
        known.model = load_model_config(known.source)
        known.vocab_size = known.model.vocab_size

    def _hear(self, engine: dict[str, Any]) -> None:
        """What a Headrace server says of itself."""
        known = self._known
        known.is_ours = True
        known.facts = engine
        known.vocab_size, known.max_seq_len = engine["vocab_size"], engine["max_seq_len"]
        known.device = engine["device"]
        if known.model is None and Path(engine["model_path"]).exists():
            self._look_at(engine["model_path"])

    def _describe(self) -> None:
        plan, known = self._plan, self._known
        if not known.is_ours:
            known.device = "cuda" if nvidia_gpus() else "cpu"
        # The server has the device to itself: what was measured before, or nothing.
        values = find_ceilings(known.device, usable_cores(), self._screen.say, plan.outputs.ceilings, may_measure=False)
        if known.model is None:
            self._screen.say("No roofline: the model's shapes are not known here; --model_path names its folder.")
        elif known.source is not None and values is not None:
            dtype = known.facts.get("dtype") or known.model.torch_dtype or "bfloat16"
            per_token = known.facts.get("kv_bytes_per_token")
            self._shape = shape_of(known.model, known.source, dtype, per_token)
            self._ceilings = as_ceilings(values)
        self._report.describe(
            known.device,
            url=self._target.base,
            model={"name": self._target.model, "dtype": known.facts.get("dtype")},
            engine={name: value for name, value in known.facts.items() if name not in NOT_REPORTED} or None,
            startup=known.facts.get("startup"),
            settings={
                "endpoint": plan.endpoint,
                "request_rate": plan.request_rate,
                "burstiness": plan.burstiness,
                "extra_body": plan.extra_body,
            },
            workload={
                "dataset": plan.workload.dataset,
                "random_seed": plan.workload.random_seed,
                "temperature": plan.workload.temperature,
                "ignore_eos": plan.workload.ignore_eos,
                "warm_cache": plan.workload.warm_cache,
            },
            num_gpus=plan.num_gpus,
            ceilings=values,
        )

    async def _measure(self) -> str | None:
        """Every level; what cut the run short, if anything did."""
        plan, known = self._plan, self._known
        concurrencies: Sequence[int | None] = plan.levels or (None,)
        # The server may have seen an earlier run's prompts.
        offset = random.SystemRandom().randrange(1, NUM_OFFSETS)
        levels = Levels(plan.workload, self._given, known.device, known.vocab_size, offset)
        try:
            await self._warm_up(concurrencies[0])
            for index, concurrency in enumerate(concurrencies):
                requests = self._sendable(levels.requests(index, concurrency))
                await self._run_level(requests, concurrency, plan.workload.random_seed + index)
        except TargetGoneError as error:
            return str(error)
        return None

    async def _warm_up(self, concurrency: int | None) -> None:
        count = self._plan.warmup
        if count > 0:
            seed = random.SystemRandom().getrandbits(48)
            requests = random_requests(count, Lengths(64), Lengths(16), self._known.vocab_size, seed)
            load = Load(self._target, units_of(self._sendable(requests)), [0.0] * count, concurrency)
            await load.run()
            failed = [record.error for record in load.records if record.error is not None]
            if len(failed) == count:
                self._screen.say(f"The warm-up failed: {failed[0]}.")

    def _sendable(self, requests: Sequence[BenchRequest]) -> list[BenchRequest]:
        """As the endpoint takes them. Raises ConfigError for ids that have to be text and nobody to write them."""
        known = self._known
        if self._plan.endpoint == "completions" or all(request.prompt is not None for request in requests):
            if known.max_seq_len is not None:
                check_lengths(requests, known.max_seq_len, known.vocab_size)
            return list(requests)
        if known.source is None:
            raise ConfigError(
                "chat takes text, and these requests are token ids: name the model's folder with --model_path, or use "
                "--endpoint completions.",
                param="endpoint",
            )
        if known.tokenizer is None:
            known.tokenizer = load_tokenizer(known.source, LlmArgs(model=known.source.original))
        return with_text(requests, known.tokenizer.decode)

    async def _run_level(self, requests: Sequence[BenchRequest], concurrency: int | None, seed: int) -> None:
        plan = self._plan
        units = units_of(requests)
        times = arrival_times(len(units), plan.request_rate, plan.burstiness, seed)
        load = Load(self._target, units, times, concurrency)
        label = f"concurrency {concurrency}" if concurrency else "no limit"
        label += f", {plan.request_rate:g} requests/s" if plan.request_rate else ""
        before = await self._stats()
        finished = False
        try:
            await self._screen.follow(label, load, load.run())
            finished = True
        finally:
            if load.records:
                level = self._summary(load, requests, concurrency)
                self._report.add(level)
        if finished and before is not None and (after := await self._stats()) is not None:
            level["steps"] = step_split(before, after, load.seconds)
            self._report.values["memory"] = after.get("memory")
            self._report.save()

    async def _stats(self) -> dict[str, Any] | None:
        """The counters of a Headrace server's engine."""
        if not self._known.is_ours:
            return None
        try:
            status, info = await self._target.get("//server_info")
        except HttpError:
            return None
        stats = info.get("stats") if status == 200 and isinstance(info, dict) else None
        return stats if isinstance(stats, dict) and "step_times_s" in stats else None

    def _summary(self, load: Load, requests: Sequence[BenchRequest], concurrency: int | None) -> dict[str, Any]:
        plan = self._plan
        level = summarize(
            load.records,
            load.seconds,
            concurrency=concurrency,
            is_meant_cold=plan.workload.is_meant_cold(requests),
            num_gpus=plan.num_gpus,
        )
        level |= {"num_unfinished": load.num_requests - len(load.records), "request_rate": plan.request_rate}
        if self._shape is not None and self._ceilings is not None and plan.num_gpus == 1:
            level["roofline"] = roofline_shares(self._shape, self._ceilings, level)
        return level | {"steps": None, "gpu": None, "trace": None}
