# SPDX-License-Identifier: Apache-2.0
"""What a run is asked to do, and the requests of each of its levels."""

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from headrace.bench.dataset import BenchRequest, apart
from headrace.bench.workload import Lengths, random_requests, take
from headrace.errors import ConfigError

REQUESTS_PER_USER = 4
MIN_REQUESTS = 8
SEED_STEP = 1_000_003
"""Between the seeds of two levels."""
DEFAULT_LENS = {"cuda": (1024, 256), "cpu": (128, 32)}
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Workload:
    """Which requests, and how they are sampled."""

    dataset: str | None = None
    num_requests: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    random_seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    warm_cache: bool = False

    def check(self) -> None:
        """Raises ConfigError for what makes no run."""
        counts = {"num_requests": self.num_requests, "input_len": self.input_len, "output_len": self.output_len}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, but is {value}.", param=name)
            if value is not None and name != "num_requests" and self.dataset is not None:
                raise ConfigError(f"{name} has no place beside a dataset, which has its own lengths.", param=name)
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"temperature must be from 0 to 100, but is {self.temperature:g}.", param="temperature")

    def lens(self, device: str) -> tuple[int, int]:
        """Prompt and output tokens of synthetic requests. device: cuda or cpu."""
        usual = DEFAULT_LENS[device]
        return self.input_len or usual[0], self.output_len or usual[1]

    def is_meant_cold(self, requests: Sequence[BenchRequest]) -> bool:
        """Whether no prompt token of these should come from the cache."""
        return not self.warm_cache and not any(request.is_warm for request in requests)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go, and what they are compared with."""

    report_json: str | None = None
    plot: str | None = None
    ceilings: str | None = None


class Levels:
    """The requests of each level of a run: no level's prompts share a prefix with another's."""

    def __init__(
        self, workload: Workload, given: Sequence[BenchRequest] | None, device: str, vocab_size: int, offset: int = 0
    ) -> None:
        """
        Args:
            given: the dataset's; None: synthetic ones.
            offset: another for each run against a server that lives on between runs.
        """
        self._workload = workload
        self._given = given
        self._lens = workload.lens(device)
        self._vocab_size = vocab_size
        self._offset = offset

    def requests(self, index: int, concurrency: int | None) -> list[BenchRequest]:
        """Those of level number `index`."""
        workload, level = self._workload, self._offset + index
        if self._given is not None:
            chosen = take(self._given, workload.num_requests, f"dataset {workload.dataset}")
            return chosen if workload.warm_cache else apart(chosen, level)
        count = workload.num_requests or max(MIN_REQUESTS, REQUESTS_PER_USER * (concurrency or 0))
        seed = workload.random_seed + SEED_STEP * level
        return random_requests(count, Lengths(self._lens[0]), Lengths(self._lens[1]), self._vocab_size, seed)


def check_levels(name: str, levels: Sequence[int] | None) -> None:
    """Raises ConfigError for a level without anybody in it."""
    wrong = next((level for level in levels or () if level < 1), None)
    if wrong is not None:
        raise ConfigError(f"{name} must be at least 1, but is {wrong}.", param=name)


def run_until_done(main: Coroutine[Any, Any, int]) -> int:
    """Run to the end on a loop of its own; Ctrl-C cancels `main`, which answers with what it has."""
    loop = uvloop.new_event_loop()
    try:
        task = loop.create_task(main)
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        return INTERRUPTED
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
