# SPDX-License-Identifier: Apache-2.0
"""Steps of fixed shapes: their bodies, heads and greedy samplers, each a CUDA graph once it is captured.

A step that fits runs padded to one of a few shapes. Its lists lie at fixed addresses in the request state, its kernels
read all lengths on the device, and what leaves a graph goes into buffers of fixed addresses, so the same few graphs
serve every step. All share one memory pool: a graph's own memory is free again when the next one runs.

Nothing is captured that was not run once before, so whatever compiles or allocates at first use has done so. Without
a `GraphPool` the same calls run one by one: the specification of the graphs, which must give the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headrace.core.padded_sizes import PaddedSize, PaddedSizes
from headrace.kernels.batch_prep import advance_rows, store_tokens
from headrace.kernels.greedy import finite_argmax
from headrace.logger import get_logger
from headrace.utils.failure import first_line
from headrace.worker.graph_pool import Graph, GraphPool
from headrace.worker.input_batch import InputBatch, StepBatch
from headrace.worker.request_state import RequestState

Capture = tuple[object, Callable[[], None]]
"""What a graph is called, and the call that it captures."""
MAX_FAILED = 3
"""Captures that may fail one after another; what is left then is not tried."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """What is captured of a model."""

    forward: Callable[[StepBatch], Tensor]
    """A step -> hidden states [num_tokens, hidden_size]."""
    compute_logits: Callable[[Tensor], Tensor]
    """[num_rows, hidden_size] -> [num_rows, vocab_size]."""
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype


class PaddedSteps:
    """Runs padded steps; captures them one at a time, when asked."""

    def __init__(
        self, sizes: PaddedSizes, model: ModelCalls, batch: InputBatch, state: RequestState, graphs: GraphPool | None
    ) -> None:
        """graphs: captures the steps; None: they run one kernel at a time."""
        device = state.words.device
        num_rows = state.records.shape[0]
        self._sizes = sizes
        self._model = model
        self._batch = batch
        self._state = state
        self._advance: Callable[..., object] = advance_rows.choose(device.type)
        self._store: Callable[..., object] = store_tokens.choose(device.type)
        self._argmax: Callable[[Tensor, Tensor], Tensor] = finite_argmax.choose(device.type)
        self.picked = torch.zeros(num_rows, model.hidden_size, dtype=model.dtype, device=device)
        """The hidden states that the head needs, of a step's sampling rows."""
        self.logits = torch.zeros(num_rows, model.vocab_size, dtype=model.dtype, device=device)
        """Theirs, where `head` made them."""
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """The tokens that `greedy` picked."""
        self._pool = graphs
        self._captures = graphs is not None
        self._graphs: dict[object, Graph] = {}
        self._to_capture = self._all_calls() if graphs is not None else []
        self._to_capture.reverse()
        self._num_failed = 0

    def size_of(self, num_tokens: int, num_rows: int, *, is_decode: bool) -> PaddedSize | None:
        """The shape that a step runs in; None: it runs as it is."""
        size = self._sizes.of_body(num_tokens, num_rows, is_decode=is_decode)
        while size is not None and self._captures and size not in self._graphs:
            # Not captured yet: the next larger one that is.
            size = self._sizes.of_body(size.num_tokens + 1, size.num_rows + 1, is_decode=size.is_decode)
        return size

    def rows_of_head(self, num_rows: int) -> int | None:
        """The number of rows that the head of a step runs with; None: it runs as it is."""
        found = self._sizes.of_head(num_rows)
        while found is not None and self._captures and ("greedy", found) not in self._graphs:
            found = self._sizes.of_head(found + 1)
        return found

    def body(self, size: PaddedSize) -> None:
        """Run the body of the step whose lists lie in the state; its sampling rows' hidden states are in `picked`."""
        self._run(size, self._body, size)

    def head(self, num_rows: int) -> None:
        """From `picked` to `logits`."""
        self._run(("head", num_rows), self._head, num_rows)

    def greedy(self, num_rows: int) -> None:
        """From `picked` to `token_ids`, stored into the rows of the list `sample_rows`."""
        self._run(("greedy", num_rows), self._greedy, num_rows)

    def capture_next(self) -> bool:
        """Capture one more call. False: there is none left. The state's step lists are overwritten."""
        if not self._to_capture or self._pool is None:
            return False
        key, call = self._to_capture.pop()
        self._state.clear_step_lists()
        try:
            call()
            self._graphs[key] = self._pool.capture(call)
            self._num_failed = 0
        except RuntimeError as error:
            self._do_without(key, error)
        if not self._to_capture:
            taken = self._pool.num_bytes / 2**30
            logger.info("CUDA graphs: %d are captured and take %.2f GiB.", self.num_captured, taken)
        return True

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def num_to_capture(self) -> int:
        return len(self._to_capture)

    @property
    def graph_bytes(self) -> int:
        """What the graphs take so far."""
        return 0 if self._pool is None else self._pool.num_bytes

    def _do_without(self, key: object, error: RuntimeError) -> None:
        """A capture failed: its steps run in a larger size, or one kernel at a time."""
        self._num_failed += 1
        logger.warning("No CUDA graph for %s: %s. Such steps run without it.", _name_of(key), first_line(error))
        if self._num_failed == MAX_FAILED and self._to_capture:
            logger.warning(
                "%d captures in a row failed, so %d CUDA graphs are left out; a smaller "
                "kv_cache_config.free_gpu_memory_fraction, or fewer sizes in cuda_graph_config, leaves room for them.",
                MAX_FAILED,
                len(self._to_capture),
            )
            self._to_capture.clear()

    def _run(self, key: object, call: Callable[..., None], size: object) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            call(size)
        else:
            graph.replay()

    def _all_calls(self) -> list[Capture]:
        """What to capture: the largest first, whose memory all others then share; of the others small sizes first, as a
        single request needs those, and everybody's end."""
        heads: list[tuple[int, object, Callable[[], None]]] = [
            (num_rows, (name, num_rows), partial(call, num_rows))
            for num_rows in self._sizes.decode
            for name, call in (("head", self._head), ("greedy", self._greedy))
        ]
        bodies: list[tuple[int, object, Callable[[], None]]] = [
            (size.num_tokens, size, partial(self._body, size)) for size in self._sizes.body_sizes()
        ]
        largest = [group.pop() for group in (heads, bodies) if group]
        rest = sorted(heads + bodies, key=lambda each: each[0])
        return [(key, call) for _, key, call in largest + rest]

    def _body(self, size: PaddedSize) -> None:
        step = self._batch.gather_padded(size)
        hidden_states = self._model.forward(step)
        state, num_rows = self._state, size.num_rows
        sampled = state.step_list("sampled", num_rows)
        torch.index_select(hidden_states, 0, sampled, out=self.picked[:num_rows])
        self._advance(step.rows, step.metadata.query_start_loc, state.num_computed_tokens)

    def _head(self, num_rows: int) -> None:
        self.logits[:num_rows].copy_(self._model.compute_logits(self.picked[:num_rows]))

    def _greedy(self, num_rows: int) -> None:
        token_ids = self._argmax(self._model.compute_logits(self.picked[:num_rows]), self.token_ids[:num_rows])
        state = self._state
        self._store(state.step_list("sample_rows", num_rows), token_ids, state.num_tokens, state.token_ids)


def _name_of(key: object) -> str:
    """What a graph serves, for a log line."""
    if isinstance(key, PaddedSize):
        kind = "decode steps of" if key.is_decode else "mixed steps of"
        return f"{kind} {key.num_tokens} tokens"
    name, num_rows = key if isinstance(key, tuple) else (key, 0)
    return f"the {name} of {num_rows} rows"
