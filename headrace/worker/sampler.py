# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: the order of logits processing, spelled out.

 1. Logits in fp32.
 2. Log-probabilities, where asked for, of these raw logits: before every edit below (vLLM's default, `raw_logprobs`).
 3. Penalties. Repetition over prompt and output: a positive logit is divided, a negative one multiplied
    (Transformers). Frequency, once per occurrence, and presence, once, over output tokens only (OpenAI).
 4. `logit_bias` is added: what a user adds arrives at the draw undistorted by a repetition penalty (vLLM adds it before
    the penalties, which differs only where both are used).
 5. `min_tokens`: end and stop tokens become impossible until that many output tokens exist.
 6. A row with temperature below 1e-5, top_k 1, top_p 0 or min_p 1 takes its largest logit, and is done.
 7. Division by the temperature.
 8. `min_p`, against the most probable token: first of the filters, as in vLLM and TensorRT-LLM (in Transformers last).
 9. `top_k`; then `top_p` over what is left, renormalised. Tokens that tie with the last one kept are kept.
10. The draw: one uniform number per row, a hash of (seed, output position, choice index), through the inverse CDF in
    order of token id. Neither row, batch nor step enters.

Steps that no row of a batch needs are skipped, and a step is done for the rows that need it only; the host knows which
from `RowSettings`, so nothing waits for the device. A row whose largest logit is not finite (NaN or infinity out of the
model, or every token banned) fails alone: its token is -1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.memory_estimate import SAMPLER_PIECE_BYTES
from headrace.kernels.greedy import FAILED, finite_argmax
from headrace.kernels.logprobs import gather_logprobs
from headrace.kernels.sampling import add_at, apply_penalties, draw, filter_threshold, uniforms
from headrace.worker.input_batch import SamplingRows, Subset
from headrace.worker.request_state import (
    CHOICE,
    FREQUENCY,
    MIN_P,
    MIN_TOKENS,
    NUM_PROMPT,
    NUM_TOKENS,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    RequestState,
)


@dataclass(slots=True)
class SampledTokens:
    """What came of one step's sampling rows."""

    token_ids: Tensor
    """int64 [num_rows]; FAILED where the row's logits hold no finite maximum."""
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    """`gather_logprobs` of the rows that want them, in their order."""


class Sampler:
    """The steps above over the rows' device columns."""

    def __init__(self, state: RequestState, deterministic: bool = False) -> None:
        device_type = state.words.device.type
        self._state = state
        self._penalties: Callable[..., Tensor] = apply_penalties.choose(device_type, deterministic)
        self._add_at: Callable[..., Tensor] = add_at.choose(device_type, deterministic)
        self._threshold: Callable[..., Tensor] = filter_threshold.choose(device_type, deterministic)
        self._uniforms: Callable[..., Tensor] = uniforms.choose(device_type, deterministic)
        self._draw: Callable[..., Tensor] = draw.choose(device_type, deterministic)
        self._logprobs: Callable[..., tuple[Tensor, Tensor, Tensor]] = gather_logprobs.choose(
            device_type, deterministic
        )
        self._argmax: Callable[[Tensor, Tensor], Tensor] = finite_argmax.choose(device_type, deterministic)

    def __call__(self, logits: Tensor, sampling: SamplingRows) -> SampledTokens:
        """logits: [num sampling rows, vocab] in the model's dtype; overwritten."""
        if sampling.is_plain:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            return SampledTokens(self._argmax(logits, tokens), None)
        rows_at_once = max(1, SAMPLER_PIECE_BYTES // (4 * logits.shape[1]))
        if len(logits) <= rows_at_once:
            return self._sample(logits, sampling)
        # No row looks at another: in pieces they get the same, and the peak of memory does not grow with the batch.
        starts = range(0, len(logits), rows_at_once)
        return _joined(
            [self._sample(logits[at : at + rows_at_once], sampling.part(at, at + rows_at_once)) for at in starts]
        )

    def _sample(self, logits: Tensor, sampling: SamplingRows) -> SampledTokens:
        logits = logits.float()
        wanted = sampling.logprobs
        raw = None
        if wanted is not None:
            edits = sampling.penalised or sampling.biased or sampling.banned
            raw = wanted.pick(logits)
            if edits and wanted.place_index is None:
                raw = raw.clone()
        logits = self._edit(logits, sampling)
        some = sampling.random
        if some is not None and some.place_index is None:
            best, tokens = logits.amax(dim=1), self._draw_rows(logits, some, sampling)
        else:
            best, tokens = logits.max(dim=1)
            if some is not None:
                tokens[some.place_index] = self._draw_rows(some.pick(logits), some, sampling)
        # 0 for a finite number, NaN for all others.
        tokens = torch.where(best - best == 0, tokens, FAILED)
        logprobs = None
        if wanted is not None and raw is not None:
            logprobs = self._logprobs(raw, wanted.pick(tokens).clamp(min=0), sampling.num_top)
        return SampledTokens(tokens, logprobs)

    def _edit(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """Steps 3 to 5."""
        if sampling.penalised is not None:
            logits = _edited(logits, sampling.penalised, lambda some, of: self._penalise(some, of, sampling.max_len))
        if sampling.biased is not None:
            logits = _edited(logits, sampling.biased, lambda some, of: self._bias(some, of, sampling.bias_width))
        if sampling.banned is not None:
            logits = _edited(logits, sampling.banned, lambda some, of: self._ban(some, of, sampling.ban_width))
        return logits

    def _penalise(self, logits: Tensor, rows: Tensor, max_len: int) -> Tensor:
        records = self._state.records[rows]
        floats = records.view(torch.float32)
        return self._penalties(
            logits, self._state.token_ids, rows, records[:, NUM_TOKENS], records[:, NUM_PROMPT],
            floats[:, REPETITION], floats[:, PRESENCE], floats[:, FREQUENCY], max_len,
        )  # fmt: skip

    def _bias(self, logits: Tensor, rows: Tensor, width: int) -> Tensor:
        return self._add_at(logits, self._state.bias_ids[rows, :width], self._state.bias_values[rows, :width])

    def _ban(self, logits: Tensor, rows: Tensor, width: int) -> Tensor:
        records = self._state.records[rows]
        early = records[:, NUM_TOKENS] - records[:, NUM_PROMPT] < records[:, MIN_TOKENS]
        ids = self._state.banned_ids[rows, :width]
        values = torch.where(early, -torch.inf, 0.0)[:, None].expand(ids.shape)
        return self._add_at(logits, ids, values)

    def _draw_rows(self, logits: Tensor, some: Subset, sampling: SamplingRows) -> Tensor:
        """Steps 7 to 10 for the rows that draw; their logits are not changed in place."""
        records = self._state.records[some.row_index]
        floats = records.view(torch.float32)
        logits = logits / floats[:, TEMPERATURE, None]
        thresholds = None
        if sampling.has_filters:
            thresholds = self._threshold(
                logits, records[:, TOP_K], floats[:, TOP_P], floats[:, MIN_P], sampling.num_candidates
            )
        position = records[:, NUM_TOKENS] - records[:, NUM_PROMPT]
        uniform = self._uniforms(records.view(torch.int64)[:, SEED // 2], position, records[:, CHOICE])
        return self._draw(logits, thresholds, uniform)


def _joined(parts: list[SampledTokens]) -> SampledTokens:
    """The rows of all parts, in order."""
    tables = [part.logprobs for part in parts if part.logprobs is not None]
    ids, scores, ranks = (torch.cat(columns) for columns in zip(*tables, strict=True)) if tables else (None,) * 3
    logprobs = None if ids is None or scores is None or ranks is None else (ids, scores, ranks)
    return SampledTokens(torch.cat([part.token_ids for part in parts]), logprobs)


def _edited(logits: Tensor, some: Subset, edit: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Edit the rows of a subset: in place where that is all rows."""
    assert some.row_index is not None, "the step's words are sent before its rows are sampled"
    if some.place_index is None:
        return edit(logits, some.row_index)
    logits[some.place_index] = edit(logits[some.place_index], some.row_index)
    return logits
