# SPDX-License-Identifier: Apache-2.0
"""A step's results on their way from the device to the core."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.core.output import ModelOutput, SchedulerOutput, TokenLogprobs
from headrace.worker.input_batch import PromptChunk, SamplingRows

NOT_FINITE = (
    "no token could be sampled: the model's logits hold NaN or infinity, or logit_bias and min_tokens ban every token."
)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host once the device has come that far; pinned, so that the host need not wait now."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class HostTokens:
    """One step's sampled tokens on the host, in a buffer lent to it until they have been read."""

    def __init__(self, tensor: Tensor, buffer: Tensor | None = None, home: list[Tensor] | None = None) -> None:
        self._tensor = tensor
        self._buffer = buffer
        self._home = home

    def read(self) -> list[int]:
        """The tokens, once the device has come that far. The buffer goes back: this is done once."""
        tokens: list[int] = self._tensor.tolist()
        if self._home is not None and self._buffer is not None:
            self._home.append(self._buffer)
            self._buffer = None
        return tokens


class TokenBuffers:
    """Pinned buffers that steps take in turn. A result that is read late keeps its own; another is made meanwhile."""

    def __init__(self, num_rows: int) -> None:
        """num_rows: the most that sample in one step."""
        self._num_rows = num_rows
        self._free: list[Tensor] = []

    def to_host(self, token_ids: Tensor) -> HostTokens:
        """Start the tokens on their way."""
        if token_ids.device.type == "cpu":
            # Padded steps pick into the same place every time.
            return HostTokens(token_ids.clone())
        buffer = self._free.pop() if self._free else torch.empty(self._num_rows, dtype=torch.int64, pin_memory=True)
        tensor = buffer[: token_ids.shape[0]].copy_(token_ids, non_blocking=True)
        return HostTokens(tensor, buffer, self._free)


@dataclass(slots=True)
class LogprobColumns:
    """`gather_logprobs` of some rows, on the host."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, gathered: tuple[Tensor, Tensor, Tensor]) -> "LogprobColumns":
        return cls(*(to_host(tensor) for tensor in gathered))

    def rows(self, num_top: list[int]) -> list[TokenLogprobs]:
        """One entry per row, cut to as many of the top as that row wants."""
        columns = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), num_top, strict=True)
        return [
            TokenLogprobs(ids[: 1 + k], scores[: 1 + k], [rank, *range(1, k + 1)]) for ids, scores, rank, k in columns
        ]


@dataclass(slots=True)
class StepResult:
    """What the device thread leaves for the host."""

    error: str | None = None
    """The step raised: every row of it failed."""
    is_device_lost: bool = False
    """The error is one that no later step can survive."""
    row_errors: dict[int, str] = field(default_factory=dict)
    """Index in `scheduled` -> why that row failed."""
    sampling: SamplingRows | None = None
    token_ids: HostTokens | None = None
    logprobs: LogprobColumns | None = None
    num_top: list[int] = field(default_factory=list)
    """Per row of `sampling.logprobs`: how many of the top it wants."""
    prompt_logprobs: list[tuple[PromptChunk, list[LogprobColumns]]] = field(default_factory=list)
    ready: torch.cuda.Event | None = None
    """Recorded after the copies to the host; None where nothing is asynchronous."""


class PendingOutput:
    """The result of a launched plan."""

    def __init__(self, plan: SchedulerOutput, result: "Future[StepResult]") -> None:
        self._plan = plan
        self._result = result
        self._output: ModelOutput | None = None

    def wait(self) -> ModelOutput:
        """Block until the step's tokens are on the host. Raises what made the device unusable, if that happened."""
        if self._output is not None:
            return self._output
        result = self._result.result()
        if result.is_device_lost:
            raise RuntimeError(result.error)
        if result.error is None and result.ready is not None:
            result.ready.synchronize()
        self._output = _output(self._plan, result)
        return self._output


def _output(plan: SchedulerOutput, result: StepResult) -> ModelOutput:
    """The results by their places in the plan."""
    if result.error is not None:
        num_rows = plan.num_rows
        return ModelOutput(plan.step_id, [], [0] * num_rows, errors=dict.fromkeys(range(num_rows), result.error))
    token_ids: list[int] = []
    logprobs: dict[int, list[TokenLogprobs]] = {}
    errors = result.row_errors
    sampling = result.sampling
    if sampling is not None and result.token_ids is not None:
        token_ids = result.token_ids.read()
        if min(token_ids) < 0:
            failed = zip(sampling.places, token_ids, strict=True)
            errors = {place: NOT_FINITE for place, token_id in failed if token_id < 0} | errors
        if result.logprobs is not None and sampling.logprobs is not None:
            scores = zip(sampling.logprobs.places, result.logprobs.rows(result.num_top), strict=True)
            logprobs = {sampling.places[index]: [entry] for index, entry in scores}
    prompt_logprobs = {chunk.place: _prompt_rows(chunk, parts) for chunk, parts in result.prompt_logprobs}
    return ModelOutput(plan.step_id, token_ids, None, logprobs, prompt_logprobs, errors)


def _prompt_rows(chunk: PromptChunk, parts: list[LogprobColumns]) -> list[TokenLogprobs]:
    return [entry for part in parts for entry in part.rows([chunk.num_top] * len(part.ranks))]
