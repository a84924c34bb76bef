# SPDX-License-Identifier: Apache-2.0
"""Carries plans out: rows, tensors, body, head, sampler. Runs on the device's side of the launch queue."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.attention.long_chunk import LongShapes
from headrace.core.output import SchedulerOutput
from headrace.core.padded_sizes import PaddedSizes
from headrace.kernels.batch_prep import advance_rows, store_tokens
from headrace.kernels.kv_cache import copy_blocks
from headrace.kernels.logprobs import gather_logprobs
from headrace.layers.build import ForwardContext
from headrace.logger import get_logger
from headrace.utils.math import cdiv
from headrace.worker.block_copies import rounds_of_copies
from headrace.worker.graph_pool import GraphPool
from headrace.worker.input_batch import InputBatch, PromptChunk, SamplingRows, StepBatch
from headrace.worker.kv_cache import KVArenas
from headrace.worker.padded_steps import ModelCalls, PaddedSteps
from headrace.worker.request_state import RequestState, RowSettings
from headrace.worker.sampler import Sampler
from headrace.worker.step_result import LogprobColumns, StepResult, TokenBuffers
from headrace.worker.upload import StepWords, Uploader

MAX_PROMPT_LOGITS_BYTES = 64 << 20
"""Logits of prompt positions are made in pieces of this size, so that a long prompt's do not fill the memory."""

logger = get_logger(__name__)


class RunnableModel(Protocol):
    """What the runner asks of a model: `models.base.CausalLM` has it."""

    needs_prompt_lens: bool

    def forward(self, fwd: ForwardContext) -> Tensor: ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Padding:
    """How steps are padded."""

    sizes: PaddedSizes
    hidden_size: int
    dtype: torch.dtype
    """Of the hidden states and the logits."""
    captures: bool
    """Padded steps are captured as CUDA graphs (`ModelRunner.capture_next`)."""


@dataclass(slots=True)
class _RunStep:
    """A step between its two launches."""

    sampling: SamplingRows | None
    """None where no row samples."""
    logits: Tensor | None = None
    """Of the sampling rows."""
    token_ids: Tensor | None = None
    """Picked and stored already."""


class ModelRunner:
    """`forward(plan)` then `sample(plan, masks)` for each plan, in the order of their launch."""

    def __init__(
        self,
        model: RunnableModel,
        state: RequestState,
        arenas: KVArenas,
        max_num_tokens: int,
        tokens_per_block: int,
        vocab_size: int,
        *,
        clear_new_blocks: bool,
        padding: Padding | None = None,
        long_shapes: LongShapes | None = None,
        deterministic: bool = False,
    ) -> None:
        """
        Args:
            long_shapes: which prefill chunks attend by themselves; None: none do.
            deterministic: a row's tokens and log-probabilities do not depend on the rows beside it.
            padding: steps that fit run padded to its sizes.
            clear_new_blocks: zero a block when a row takes it. For attention that multiplies masked places by 0, where
                NaN left behind by a failed request would reach the block's next owner.
        """
        self._model = model
        self._state = state
        self.arenas = arenas
        self._vocab_size = vocab_size
        self._clear_new_blocks = clear_new_blocks
        self._tokens_per_block = tokens_per_block
        device_type = state.words.device.type
        self._is_cuda = device_type == "cuda"
        self._uploader = Uploader(state.words)
        self._batch = InputBatch(state, max_num_tokens, tokens_per_block, vocab_size, long_shapes)
        self._sampler = Sampler(state, deterministic)
        self._token_buffers = TokenBuffers(state.records.shape[0])
        self._advance: Callable[..., object] = advance_rows.choose(device_type)
        self._store: Callable[..., object] = store_tokens.choose(device_type)
        self._copy_blocks: Callable[..., object] = copy_blocks.choose(device_type)
        self._prompt_logprobs: Callable[..., tuple[Tensor, Tensor, Tensor]] = gather_logprobs.choose(
            device_type, deterministic
        )
        self._padded: PaddedSteps | None = None
        if padding is not None:
            calls = ModelCalls(self._run_body, model.compute_logits, padding.hidden_size, vocab_size, padding.dtype)
            graphs = GraphPool() if padding.captures else None
            self._padded = PaddedSteps(padding.sizes, calls, self._batch, state, graphs)
        self._step: _RunStep | None = None
        self._result = StepResult()

    def capture_next(self) -> bool:
        """Capture one more CUDA graph, while no step is in flight. False: there is none left."""
        if self._padded is None:
            return False
        self._batch.lists.forget()
        return self._padded.capture_next()

    @property
    def graph_bytes(self) -> int:
        """What the CUDA graphs captured so far take of the device."""
        return 0 if self._padded is None else self._padded.graph_bytes

    @property
    def num_to_capture(self) -> int:
        """CUDA graphs that `capture_next` has yet to capture."""
        return 0 if self._padded is None else self._padded.num_to_capture

    def forward(self, plan: SchedulerOutput) -> None:
        """Change the rows as the plan says, run the body over its tokens, and the head where a token is sampled."""
        self._result = StepResult()
        self._step = None
        try:
            self._step = self._forward(plan)
        except Exception as error:
            self._batch.lists.forget()
            self._fail(error)

    def sample(self, plan: SchedulerOutput, masks: None) -> StepResult:
        """Pick the tokens, write them into the rows, and start their way to the host."""
        result = self._result
        if result.error is None:
            try:
                self._sample(plan)
            except Exception as error:
                self._fail(error)
        return result

    def _forward(self, plan: SchedulerOutput) -> _RunStep | None:
        words = StepWords()
        self._state.stage(plan, words)
        staged = self._batch.stage(plan, words, None if self._padded is None else self._padded.size_of)
        copies = [(group, words.read(pairs)) for group, pairs in rounds_of_copies(plan.cache_plan.device_copies)]
        self._uploader.send(words)
        if self._clear_new_blocks:
            self._clear(plan)
        for group, pairs in copies:
            self._copy_blocks(self.arenas.groups[group], words.view(pairs).view(-1, 2))
        if not plan.num_rows:
            return None
        if self._padded is not None and staged.size is not None:
            self._padded.body(staged.size)
            sampling = None if staged.sampling is None else self._batch.bind(words, staged)
            return self._run_head(_RunStep(sampling), None)
        step = self._batch.gather(words, staged)
        hidden_states = self._run_body(step)
        self._advance(step.rows, step.metadata.query_start_loc, self._state.num_computed_tokens)
        for chunk in step.prompt_chunks:
            self._result.prompt_logprobs.append((chunk, self._score_prompt(hidden_states, chunk)))
        if step.sampling is not None and step.logits_index is not None:
            hidden_states = hidden_states[step.logits_index]
        return self._run_head(_RunStep(step.sampling), hidden_states)

    def _run_head(self, step: _RunStep, hidden_states: Tensor | None) -> _RunStep:
        """Logits of the rows that sample; their tokens at once where that is an argmax of a padded step.

        hidden_states: theirs; None: they lie where a padded body leaves them.
        """
        sampling, padded = step.sampling, self._padded
        if sampling is None:
            return step
        num_rows = len(sampling.places)
        num_padded = None if padded is None else padded.rows_of_head(num_rows)
        if padded is None or num_padded is None:
            if hidden_states is None:
                assert padded is not None, "only a padded body leaves its hidden states elsewhere"
                hidden_states = padded.picked[:num_rows]
            step.logits = self._model.compute_logits(hidden_states)
            return step
        if hidden_states is not None:
            padded.picked[:num_rows].copy_(hidden_states)
        if sampling.is_plain:
            padded.greedy(num_padded)
            step.token_ids = padded.token_ids[:num_rows]
        else:
            padded.head(num_padded)
            step.logits = padded.logits[:num_rows]
        return step

    def _clear(self, plan: SchedulerOutput) -> None:
        """Zero the blocks that rows take with this plan; those found in the prefix cache hold what they should."""
        taken: list[tuple[int, list[int]]] = [(append.group, append.block_ids) for append in plan.appended_blocks]
        for admitted in plan.admitted:
            num_cached = cdiv(admitted.num_computed_tokens, self._tokens_per_block)
            taken += [(group, ids[num_cached:]) for group, ids in enumerate(admitted.block_ids)]
        for group, block_ids in taken:
            if block_ids:
                arena = self.arenas.groups[group]
                arena.index_fill_(0, torch.tensor(block_ids, device=arena.device), 0)

    def _run_body(self, step: StepBatch) -> Tensor:
        prompt_lens = self._state.num_prompt_tokens[step.rows] if self._model.needs_prompt_lens else None
        return self._model.forward(
            ForwardContext(
                input_ids=step.input_ids,
                positions=step.positions,
                attention=step.metadata,
                kv_caches=self.arenas.layers,
                groups=self.arenas.group_of_layer,
                prompt_lens=prompt_lens,
            )
        )

    def _sample(self, plan: SchedulerOutput) -> None:
        step, result = self._step, self._result
        if step is None:
            return
        settings = self._state.settings
        if self._state.num_failed:
            for place, row in enumerate(plan.scheduled):
                has = settings[row.row]
                if has is not None and has.error is not None:
                    result.row_errors[place] = has.error
        sampling = step.sampling
        if sampling is not None:
            token_ids = step.token_ids
            if token_ids is None:
                token_ids = self._pick(step, sampling)
            result.sampling = sampling
            result.token_ids = self._token_buffers.to_host(token_ids)
        if self._is_cuda:
            result.ready = torch.cuda.Event()
            result.ready.record()

    def _pick(self, step: _RunStep, sampling: SamplingRows) -> Tensor:
        """Sample from the step's logits and store the tokens into the rows."""
        assert step.logits is not None and sampling.rows.row_index is not None, "a step that samples has logits"
        sampled = self._sampler(step.logits, sampling)
        state, settings = self._state, self._state.settings
        self._store(sampling.rows.row_index, sampled.token_ids, state.num_tokens, state.token_ids)
        if sampled.logprobs is not None and sampling.logprobs is not None:
            self._result.logprobs = LogprobColumns.of(sampled.logprobs)
            self._result.num_top = [_num_top(settings[row]) for row in sampling.logprobs.rows]
        return sampled.token_ids

    def _score_prompt(self, hidden_states: Tensor, chunk: PromptChunk) -> list[LogprobColumns]:
        """Log-probabilities of the prompt tokens that follow a chunk's, a few rows of logits at a time."""
        targets = self._state.token_ids[chunk.row, chunk.start + 1 : chunk.start + 1 + chunk.count]
        piece = max(1, MAX_PROMPT_LOGITS_BYTES // (4 * self._vocab_size))
        parts = []
        for at in range(0, chunk.count, piece):
            end = min(at + piece, chunk.count)
            logits = self._model.compute_logits(hidden_states[chunk.first + at : chunk.first + end]).float()
            parts.append(LogprobColumns.of(self._prompt_logprobs(logits, targets[at:end], chunk.num_top)))
        return parts

    def _fail(self, error: Exception) -> None:
        """The step's rows end with the error; the worker goes on unless the device itself is lost."""
        logger.error("A step failed; its requests end, the others go on.", exc_info=error)
        self._result.error = f"{type(error).__name__} in the model: {error}"
        if self._is_cuda:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                self._result.is_device_lost = True


def _num_top(settings: RowSettings | None) -> int:
    return (settings.logprobs or 0) if settings is not None else 0
