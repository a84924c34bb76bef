# SPDX-License-Identifier: Apache-2.0
"""How the core reaches its workers: one protocol, whatever their number and wherever they run."""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from headrace.config.resolve import ResolvedConfig
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.output import ModelOutput, SchedulerOutput
from headrace.core.transfer import Transfer, TransferResult
from headrace.utils.hub import ModelSource

ProgressCallback = Callable[[str, int, int], None]
"""(label, done, total), both in bytes or items."""
UNIPROC = "headrace.engine.executor:UniprocExecutor"
WORKER = "headrace.worker.worker:Worker"
DEVICE_FACTS = "headrace.worker.device:device_facts"


class PendingOutput(Protocol):
    """The result of a launched plan."""

    def wait(self) -> ModelOutput:
        """Block until the plan's tokens are on the host."""
        ...


class WorkerInfo(Protocol):
    """What a started worker measured; `headrace.worker` has the class."""

    @property
    def layout(self) -> CacheLayout:
        """Of the KV cache on the device."""
        ...

    @property
    def tokens_per_block(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def attn_backend(self) -> str:
        """What AUTO chose, or the one that was asked for."""
        ...

    @property
    def max_seq_len(self) -> int:
        """What the cache holds, where that is less than the settings' `auto` value."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of each group in the host tier; 0: there is none."""
        ...

    @property
    def ledger(self) -> list[str]: ...
    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the start, in order; what is left of it belongs to whoever called."""
        ...


class Tracer(Protocol):
    """Records what the device does; `headrace.worker.trace` has the class."""

    def start(self) -> None:
        """Begin to record (a second or more)."""
        ...

    def mark(self) -> None:
        """What began before now does not count."""
        ...

    def stop(self, num_steps: int) -> dict[str, Any]:
        """End the recording and summarise it. num_steps: steps that ended since `mark`."""
        ...


class Executor(Protocol):
    """Carries plans out in the order of their launch.

    `forward` and `sample` return at once: masks and other things of the host join between the two while the body runs,
    and the next plan may be launched before this one's result is known.
    """

    def start(self, progress: ProgressCallback) -> WorkerInfo:
        """Load the model and allocate the cache (seconds to minutes)."""
        ...

    def forward(self, plan: SchedulerOutput) -> None: ...

    def sample(self, plan: SchedulerOutput, masks: Any) -> PendingOutput: ...

    def use_idle_time(self) -> bool:
        """With no plan in flight: do a little of what may wait for such a moment. False: nothing is left for good."""
        ...

    def transfer(self, transfer: Transfer) -> None:
        """Begin to move KV blocks, after the plans that are launched. Returns at once, as `poll_transfers` does."""
        ...

    def poll_transfers(self) -> list[TransferResult]:
        """The transfers that have ended since the last call."""
        ...

    def num_ready_host_blocks(self) -> int:
        """How many of `WorkerInfo.num_host_blocks` can be used: the first so many ids. It takes a while to pin all."""
        ...

    @property
    def tracer(self) -> Tracer: ...

    def memory(self) -> dict[str, int]:
        """Bytes of the device: `peak_bytes` since start, `total_bytes` there are."""
        ...

    def shutdown(self) -> None:
        """Let go of the device. Any number of times."""
        ...


class UniprocExecutor:
    """One rank, in the core's own process."""

    def __init__(self, config: ResolvedConfig, source: ModelSource, worker: str = WORKER) -> None:
        self._worker: Executor = load_by_name(worker)(config, source)
        # No layer in between on the way of every step.
        self.forward = self._worker.forward
        self.sample = self._worker.sample
        self.use_idle_time = self._worker.use_idle_time
        self.transfer = self._worker.transfer
        self.poll_transfers = self._worker.poll_transfers
        self.num_ready_host_blocks = self._worker.num_ready_host_blocks

    def start(self, progress: ProgressCallback) -> WorkerInfo:
        return self._worker.start(progress)

    @property
    def tracer(self) -> Tracer:
        return self._worker.tracer

    def memory(self) -> dict[str, int]:
        return self._worker.memory()

    def shutdown(self) -> None:
        self._worker.shutdown()


def load_by_name(name: str) -> Any:
    """The object that "module:name" names: how the engine reaches what it must not import (torch lives there)."""
    module, _, attribute = name.partition(":")
    return vars(importlib.import_module(module))[attribute]
