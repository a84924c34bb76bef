# SPDX-License-Identifier: Apache-2.0
"""How far the demo model's default path on a CPU (4-bit weights, bf16) is from the same file in fp32.

Teacher-forced over one text: at each position KL(fp32 || default) in nats, over the whole vocabulary. Tokens go in one
at a time, so that the 4-bit products of decoding are what is measured, or all at once, which is prefill's bf16 copy.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.core_client import CoreOptions
from headrace.engine.executor import ProgressCallback, WorkerInfo
from headrace.sampling_params import SamplingParams
from headrace.worker.worker import Worker

TEXT = """A headrace is the channel that carries water to a mill wheel. In the village where my grandmother was born \
there were two of them, cut into the same hillside by rival families in 1782 and 1784, and for nearly a century nobody \
could agree which mill had the better right to the river. The older one was built of grey stone and ran straight; the \
younger was lined with oak planks, leaked in every dry summer, and had to be repaired each spring before the snow \
melted. "Water does not read contracts," the priest used to say, and he was right: after a storm it went wherever the \
ground was lowest.

The energy in such a channel is easy to estimate. If Q cubic metres of water fall through a height of h metres every \
second, the power is P = 1000 * 9.81 * Q * h watts, so half a cubic metre and a fall of four metres give about 19.6 \
kilowatts, of which a wooden wheel keeps perhaps sixty percent. That was enough to turn two pairs of stones, and on \
Saturdays a saw.

def power(flow, height, efficiency=0.6):
    return 1000 * 9.81 * flow * height * efficiency

Today one of the mills is a small museum. Visitors can buy flour, postcards and honey, and on the first Sunday in May \
the sluice is opened, the wheel groans, and children run along the bank to race the leaves that they have thrown into \
the water."""

MAX_LEN = 512

_rows: list[Tensor] = []


class RecordingWorker(Worker):
    """A worker that keeps every row of logits its model makes."""

    def _start(self, progress: ProgressCallback | None) -> WorkerInfo:
        info = super()._start(progress)
        assert self._runner is not None
        compute = self._runner._model.compute_logits

        def recorded(hidden_states: Tensor) -> Tensor:
            logits = compute(hidden_states)
            _rows.append(logits.float().clone())
            return logits

        self._runner._model.compute_logits = recorded
        return info


@contextlib.contextmanager
def _recorded() -> Iterator[list[Tensor]]:
    _rows.clear()
    try:
        yield _rows
    finally:
        _rows.clear()


def text_logprobs(model: str, **settings: Any) -> Tensor:
    """Log-probabilities fp32 [num_tokens, vocab] after each token of `TEXT`, by an engine with these settings."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    core = CoreOptions(in_process=True, worker=f"{__name__}:RecordingWorker")

    async def run() -> int:
        async with AsyncLLM(
            model=model, device="cpu", max_seq_len=MAX_LEN, max_batch_size=1, core=core, **settings
        ) as llm:
            output = await llm.generate(TEXT, params).final()
            return len(output.prompt_token_ids)

    with _recorded() as rows:
        num_tokens = asyncio.run(run())
        logits = torch.cat(rows)
    assert len(logits) == num_tokens, f"{len(logits)} rows of logits for {num_tokens} tokens"
    return logits.log_softmax(1)


def kl_to_fp32(model: str, num_threads: int | str = "auto") -> dict[str, Tensor]:
    """KL(fp32 || default) at each position, [num_tokens]: `decode` token by token, `prefill` in one step."""
    exact = text_logprobs(model, dtype="float32", num_threads=num_threads, max_num_tokens=MAX_LEN)
    return {
        way: (exact.exp() * (exact - text_logprobs(model, num_threads=num_threads, max_num_tokens=step))).sum(1)
        for way, step in {"decode": 1, "prefill": MAX_LEN}.items()
    }
