# SPDX-License-Identifier: Apache-2.0
"""Made-up steps: to measure what the largest one takes, and to have every kernel compiled before the first request."""

from collections.abc import Iterator

import torch

from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.output import AdmittedRequest, CachePlan, ScheduledRow, SchedulerOutput
from headrace.core.request import SamplingSpec
from headrace.utils.math import cdiv
from headrace.worker.model_runner import ModelRunner

GREEDY = SamplingSpec(temperature=0.0)
EVERYTHING = SamplingSpec(
    temperature=0.8,
    top_k=0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 0.1},
    min_tokens=1,
    eos_token_ids=[0],
    logprobs=20,
)
"""Every step of the sampler, the sort of the whole vocabulary included."""


def made_up_plan(
    lengths: list[tuple[int, int]], spec: SamplingSpec, layout: CacheLayout, tokens_per_block: int
) -> SchedulerOutput:
    """A step of rows 0, 1, ...: (tokens that count as computed, tokens to run) of each. Blocks are used many times."""
    admitted, scheduled = [], []
    # Each group has slabs of its own, if there are so many.
    num_slabs = max(1, layout.num_slabs // len(layout.groups))
    starts = [place * num_slabs % layout.num_slabs * g.blocks_per_slab for place, g in enumerate(layout.groups)]
    counts = [num_slabs * group.blocks_per_slab for group in layout.groups]
    for row, (computed, count) in enumerate(lengths):
        width = range(cdiv(computed + count, tokens_per_block))
        blocks = tuple([first + index % num for index in width] for first, num in zip(starts, counts, strict=True))
        tokens = [0] * (computed + count)
        admitted.append(AdmittedRequest(row, tokens, len(tokens), computed, blocks, spec))
        scheduled.append(ScheduledRow(row, count, True, computed))
    scheduled.sort(key=lambda each: each.num_tokens > 1)
    return SchedulerOutput(0, list(range(len(lengths))), admitted, [], CachePlan(), scheduled)


def largest_step(max_batch_size: int, max_num_tokens: int, max_seq_len: int) -> list[tuple[int, int]]:
    """As many rows as there can be, with as many tokens as there can be in all."""
    num_rows = min(max_batch_size, max_num_tokens)
    each, rest = divmod(max_num_tokens, num_rows)
    return [(0, min(each + (row < rest), max_seq_len)) for row in range(num_rows)]


def warm_up_steps(
    device: str, max_batch_size: int, max_num_tokens: int, max_seq_len: int
) -> Iterator[tuple[list[tuple[int, int]], SamplingSpec]]:
    """Steps that between them use every kernel a request can need, in each of its compiled forms."""
    longest = max_seq_len - 1
    yield [(min(7, longest - 1), 1)], GREEDY
    yield [(0, min(32, max_num_tokens, longest))], EVERYTHING
    if device == "cpu":
        return
    # Compiled forms differ in whether a count is 1 or a multiple of 16, and in the length that decode splits.
    for num_rows in {min(n, max_batch_size) for n in (1, 3, 16, max_batch_size)}:
        # The longest alone: a plan holds its rows' tokens, and 256 rows of 40,000 take seconds to send.
        for computed in {min(n, longest) for n in ((5, 300, 2000, longest) if num_rows == 1 else (5, 300, 2000))}:
            for spec in (GREEDY, EVERYTHING):
                yield [(computed, 1)] * num_rows, spec
    for count in {min(n, max_num_tokens, longest) for n in (2, 16, 17, 100, 600)}:
        for computed in {0, min(64, longest - count)}:
            yield [(computed, count)], GREEDY
            if max_batch_size > 1 and count < max_num_tokens:
                yield [(5 % longest, 1), (computed, count)], GREEDY


def run(runner: ModelRunner, plan: SchedulerOutput) -> None:
    """Carry a made-up step out to its end; raises what it raises, RuntimeError with the reason."""
    runner.forward(plan)
    result = runner.sample(plan, None)
    if result.ready is not None:
        result.ready.synchronize()
    if result.error is not None:
        raise RuntimeError(result.error)


def peak_bytes(runner: ModelRunner, plan: SchedulerOutput) -> int:
    """Bytes that a step takes on the GPU beyond what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(runner, plan)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
