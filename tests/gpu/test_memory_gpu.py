# SPDX-License-Identifier: Apache-2.0
"""The ledger's prediction against what a GPU measures, and a start that takes no more than serving will."""

import json
import os
from pathlib import Path

import pytest
import torch
from test_graphs_gpu import CONFIG

from headrace.config.checkpoint import load_model_config
from headrace.config.llm_args import LlmArgs
from headrace.config.resolve import resolve
from headrace.core.kv_cache_spec import KvGroup
from headrace.core.ledger import GIB, MemoryLedger
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler
from headrace.models.base import CausalLM
from headrace.utils.hub import resolve_model
from headrace.worker.device import device_facts
from headrace.worker.memory import MemoryBook
from headrace.worker.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU"),
]
# Six layers of an 8B model's width, and its vocabulary: 4 GiB.
WIDE = CONFIG | {
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_hidden_layers": 6, "num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": False,
    "max_position_embeddings": 16_384,
}  # fmt: skip


class Watched(Worker):
    """Notes the most that was reserved while the largest step was measured, and the ledgers."""

    profiled = 0
    book: MemoryBook

    def _share_memory(self, model: CausalLM, groups: list[KvGroup], book: MemoryBook) -> MemoryLedger:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        ledger = super()._share_memory(model, groups, book)
        self.profiled, self.book = torch.cuda.max_memory_reserved() - before, book
        return ledger


def started(folder: Path, **settings: object) -> tuple[Watched, Scheduler]:
    (folder / "config.json").write_text(json.dumps(WIDE))
    args = LlmArgs(model=str(folder), load_format="dummy", **settings)
    config = resolve(args, load_model_config(resolve_model(str(folder), need_weights=False)), device_facts("cuda"))
    worker = Watched(config, resolve_model(str(folder), need_weights=False))
    info = worker.start(lambda *_: None)
    while worker.use_idle_time():
        pass
    return worker, Scheduler.from_config(config, info.layout)


def serve(worker: Worker, scheduler: Scheduler, prompts: list[list[int]], **sampling: object) -> None:
    """All requests at once, to their end."""
    for index, prompt in enumerate(prompts):
        scheduler.add_request(Request(f"r{index}", prompt, SamplingSpec(**sampling)))
    while (plan := scheduler.schedule()) is not None:
        worker.forward(plan)
        output = worker.sample(plan).wait()
        assert not output.errors
        scheduler.update(plan, output)


@pytest.mark.parametrize("max_batch_size", [256, 1024])
def test_the_ledger_predicts_what_is_measured(tmp_path: Path, max_batch_size: int) -> None:
    worker, _ = started(tmp_path, max_batch_size=max_batch_size)
    assert worker._runner is not None
    lines = worker.book.lines(worker._runner.graph_bytes, 0)
    worker.shutdown()
    columns = {line[2:44].strip(): line[44:].split() for line in lines[1:9]}
    sums = [0.0, 0.0]
    for part, bound in (("weights", 0.03), ("activations", 0.1), ("CUDA graphs", 0.1), ("request rows", 0.05)):
        (found,) = [values for name, values in columns.items() if name.startswith(part)]
        predicted, measured = float(found[0]), float(found[1])
        assert predicted == pytest.approx(measured, rel=0.05, abs=bound), part
        sums[0], sums[1] = sums[0] + predicted, sums[1] + measured
    assert sums[0] == pytest.approx(sums[1], rel=0.05)


@pytest.mark.parametrize("max_batch_size", [256, 1024])
def test_the_measuring_step_takes_at_most_two_gib_more_than_serving(tmp_path: Path, max_batch_size: int) -> None:
    worker, scheduler = started(tmp_path, max_batch_size=max_batch_size, kv_cache_config={"max_tokens": 100_000})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    # The largest step of plain requests: all rows at once, as many prompt tokens as a step holds.
    prompt = [1] * (8192 // max_batch_size)
    serve(worker, scheduler, [[i, *prompt] for i in range(max_batch_size)], temperature=0.0, max_tokens=2)
    serve(worker, scheduler, [[i] * 12_000 for i in range(4)], temperature=0.0, max_tokens=2)
    torch.cuda.synchronize()
    served = torch.cuda.max_memory_reserved() - before
    worker.shutdown()
    assert worker.profiled - served < 2 * GIB, f"{worker.profiled / GIB:.2f} GiB against {served / GIB:.2f}"


def test_sampling_in_pieces_bounds_what_many_rows_take(tmp_path: Path) -> None:
    """1,024 rows that want everything, over a vocabulary of 151,936: in one piece they took 2.2 GiB."""
    worker, scheduler = started(tmp_path, max_batch_size=1024, kv_cache_config={"max_tokens": 100_000})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    everything = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 20, "max_tokens": 8}
    serve(worker, scheduler, [[i, i + 1] for i in range(1024)], **everything)
    taken = torch.cuda.max_memory_allocated() - before
    worker.shutdown()
    assert taken < 1.3 * GIB, f"{taken / GIB:.2f} GiB"
