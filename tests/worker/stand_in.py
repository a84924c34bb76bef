# SPDX-License-Identifier: Apache-2.0
"""A model small enough to reckon by hand, whose answers depend on every token, position and KV; and a driver."""

from collections import deque

import torch
from torch import Tensor

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.kv_cache_spec import CacheLayout, KvSpec, group_layers, lay_out
from headrace.core.output import ModelOutput, SchedulerOutput
from headrace.core.padded_sizes import PaddedSizes
from headrace.core.request import Request, SamplingSpec
from headrace.core.scheduler import Scheduler, SchedulerLimits
from headrace.layers.build import ForwardContext
from headrace.worker.kv_cache import KVArenas
from headrace.worker.launch_queue import LaunchQueue, ThreadQueue
from headrace.worker.model_runner import ModelRunner, Padding
from headrace.worker.request_state import RequestState
from headrace.worker.step_result import PendingOutput

VOCAB, HIDDEN, PER_BLOCK = 61, 8, 4
MAX_SEQ_LEN, MAX_NUM_TOKENS = 96, 64
CPU = torch.device("cpu")


class StandIn:
    """Each position looks back over its row's KV with weights that decay with distance; the head is a matrix."""

    needs_prompt_lens = False

    def __init__(self, scale: float = 4.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator) * scale
        self.broken_token: int | None = None
        """A row whose newest token is this one gets NaN logits."""
        self.raises: Exception | None = None
        """Raised by the next forward."""

    def forward(self, fwd: ForwardContext) -> Tensor:
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        meta, cache = fwd.attention, fwd.kv_caches[1]
        slots = meta.slot_mapping[0]
        new = slots >= 0
        slots = slots[new]
        cache[slots // PER_BLOCK, 0, 0, slots % PER_BLOCK] = self.embedding[fwd.input_ids[new]]
        cache[slots // PER_BLOCK, 1, 0, slots % PER_BLOCK] = fwd.positions[new, None].float()
        out = torch.zeros(meta.num_tokens, HIDDEN)
        starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        for row in range(meta.num_rows):
            first, end, length = starts[row], starts[row + 1], lens[row]
            blocks = meta.block_tables[0][row, : -(-length // PER_BLOCK)].long()
            held = cache[blocks, :, 0].transpose(0, 1).flatten(1, 2)[:, :length]
            assert held[1, :, 0].tolist() == list(range(length)), "a block table names another row's blocks"
            for token in range(first, end):
                position = int(fwd.positions[token])
                out[token] = self.mix(held[0, : position + 1])
                if int(fwd.input_ids[token]) == self.broken_token:
                    out[token] = torch.nan
        return out

    def mix(self, embedded: Tensor) -> Tensor:
        """[length, HIDDEN] of all tokens so far -> the last one's hidden state."""
        ages = torch.arange(embedded.shape[0] - 1, -1, -1)
        return (embedded * (0.9**ages)[:, None]).sum(0)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.head

    def logits(self, tokens: list[int]) -> Tensor:
        """[VOCAB] after a whole sequence, without any cache."""
        return self.compute_logits(self.mix(self.embedding[torch.tensor(tokens)])[None])[0]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The tokens a correct engine gives."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


class Bench:
    """A scheduler, a cache and a runner around a stand-in model."""

    def __init__(
        self,
        model: StandIn | None = None,
        *,
        num_blocks: int = 64,
        max_batch_size: int = 4,
        max_num_tokens: int = MAX_NUM_TOKENS,
        max_prefill_tokens: int = 16,
        queue: LaunchQueue | None = None,
        is_padded: bool = False,
        captures: bool = False,
    ) -> None:
        self.model = model or StandIn()
        self.cache = KVCacheManager(CacheLayout.plain(num_blocks), PER_BLOCK)
        self.scheduler = Scheduler(
            SchedulerLimits(max_batch_size, max_num_tokens, max_prefill_tokens, MAX_SEQ_LEN), self.cache
        )
        self.state = RequestState(max_batch_size, MAX_SEQ_LEN, [MAX_SEQ_LEN // PER_BLOCK], CPU)
        groups = group_layers([KvSpec(1, HIDDEN, dtype="float32")] * 2)
        arenas = KVArenas(groups, lay_out(groups, PER_BLOCK, num_blocks), PER_BLOCK, torch.float32, CPU)
        sizes = PaddedSizes(max_batch_size, [1, 2, max_batch_size], [4, 9, 16, max_num_tokens])
        padding = Padding(sizes, HIDDEN, torch.float32, captures=captures) if is_padded else None
        self.runner = ModelRunner(
            self.model, self.state, arenas, max_num_tokens, PER_BLOCK, VOCAB, clear_new_blocks=True, padding=padding
        )
        self.queue = queue or ThreadQueue(1)
        self.deltas: dict[str, list] = {}
        self.num_steps = 0

    def launch(self, plan: SchedulerOutput) -> PendingOutput:
        """Both launches of a plan."""
        self.queue.submit(lambda: self.runner.forward(plan))
        return PendingOutput(plan, self.queue.submit(lambda: self.runner.sample(plan, None)))

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        return self.launch(plan).wait()

    def add(self, request_id: str, prompt: list[int], **sampling: object) -> None:
        spec = SamplingSpec(**{"temperature": 0.0, "max_tokens": 8, **sampling})
        self.scheduler.add_request(Request(request_id, prompt, spec))

    def run(self, depth: int = 2) -> dict[str, list[int]]:
        """Until no request is left, with up to `depth` plans in flight; the tokens of each request."""
        flight: deque[tuple[SchedulerOutput, PendingOutput]] = deque()
        while self.scheduler.has_work() or flight:
            while len(flight) < depth and (plan := self.scheduler.schedule()) is not None:
                flight.append((plan, self.launch(plan)))
                self.num_steps += 1
            plan, pending = flight.popleft()
            for delta in self.scheduler.update(plan, pending.wait()):
                self.deltas.setdefault(delta.request_id, []).append(delta)
        return {name: [t for d in deltas for t in d.new_token_ids] for name, deltas in self.deltas.items()}

    def close(self) -> None:
        self.queue.close()
