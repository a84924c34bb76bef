# SPDX-License-Identifier: Apache-2.0
"""The rows: everything a running request is, in fixed tensors on the device.

All of it lies in one int32 tensor cut into views (floats and 64-bit seeds are views of its words), so whatever a plan
changes is a few runs of words, sent in one copy. The host keeps only what says which work a row needs (`RowSettings`).
Counts that move with each step (`num_computed_tokens`, `num_tokens`) are changed on the device alone.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.core.output import AdmittedRequest, SchedulerOutput
from headrace.core.request import SamplingSpec
from headrace.utils.math import round_up
from headrace.worker.device import lazy_zeros
from headrace.worker.upload import StepWords

GREEDY_TEMPERATURE = 1e-5
"""Below it a row is greedy: a smaller divisor would overflow the logits."""
MAX_BANNED_IDS = 256
"""End and stop tokens of one request that `min_tokens` holds back."""
MAX_BIAS_IDS = 1024
"""Entries of one request's `logit_bias`."""

# Words of a row's record, in the order of _RECORD; the seed is two words, at an even place.
NUM_COMPUTED, NUM_TOKENS, NUM_PROMPT, MIN_TOKENS, TOP_K, CHOICE, SEED = 0, 1, 2, 3, 4, 5, 6
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = 8, 9, 10, 11, 12, 13
RECORD_WORDS = 16
_RECORD = struct.Struct("<6iQ6f8x")

# What a row needs beyond an argmax: bits of `RowSettings.needs`.
PENALTIES, BIAS, BANS, RANDOM, LOGPROBS = 1, 2, 4, 8, 16
FILTERS, WHOLE_VOCABULARY = 32, 64
"""Only where RANDOM is: top_k, top_p or min_p; of these top_p without top_k, which has to look at every token."""

STEP_LISTS = ("rows", "query_start_loc", "sampled", "sample_rows")
"""Lists of a step that runs padded, at fixed addresses: its rows, -1 for padding; their first tokens; the token whose
hidden state each sampling row needs, 0 for padding; the sampling rows, -1 for padding."""
LIST_ALIGNMENT = 4
"""Words: 16 bytes, for which kernels are compiled."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Which work a row needs, as the host knows it without asking the device."""

    is_greedy: bool
    top_k: int
    """0 is off."""
    has_top_p: bool
    has_min_p: bool
    has_penalties: bool
    num_banned: int
    """Ids that `min_tokens` bans; 0 without it."""
    num_bias: int
    logprobs: int | None
    prompt_logprobs: int | None
    num_prompt_tokens: int
    error: str | None = None
    """Why the row could not be set up; whatever comes of it is this error."""
    needs: int = field(init=False)
    """Bits: PENALTIES and so on. 0 is argmax and nothing else."""

    def __post_init__(self) -> None:
        needs = PENALTIES * self.has_penalties | BIAS * (self.num_bias > 0) | BANS * (self.num_banned > 0)
        needs |= RANDOM * (not self.is_greedy) | LOGPROBS * (self.logprobs is not None)
        if not self.is_greedy:
            needs |= FILTERS * (self.top_k > 0 or self.has_top_p or self.has_min_p)
            needs |= WHOLE_VOCABULARY * (self.has_top_p and not self.top_k)
        object.__setattr__(self, "needs", needs)


def settings_of(admitted: AdmittedRequest) -> RowSettings:
    """A request's settings as the host's half of its row."""
    spec = admitted.sampling
    banned = banned_ids(spec)
    error = None
    if len(banned) > MAX_BANNED_IDS:
        error = f"min_tokens with {len(banned)} end and stop tokens: at most {MAX_BANNED_IDS} can be held back."
    elif len(spec.logit_bias) > MAX_BIAS_IDS:
        error = f"logit_bias has {len(spec.logit_bias)} entries: at most {MAX_BIAS_IDS} are possible."
    return RowSettings(
        is_greedy=spec.temperature < GREEDY_TEMPERATURE or spec.top_k == 1 or spec.top_p <= 0 or spec.min_p >= 1,
        top_k=max(spec.top_k, 0),
        has_top_p=spec.top_p < 1,
        has_min_p=spec.min_p > 0,
        has_penalties=spec.repetition_penalty != 1 or spec.presence_penalty != 0 or spec.frequency_penalty != 0,
        num_banned=0 if error else len(banned),
        num_bias=0 if error else len(spec.logit_bias),
        logprobs=spec.logprobs,
        prompt_logprobs=spec.prompt_logprobs,
        num_prompt_tokens=admitted.num_prompt_tokens,
        error=error,
    )


def banned_ids(spec: SamplingSpec) -> list[int]:
    """Tokens that end a request, where `min_tokens` holds them back."""
    return sorted({*spec.eos_token_ids, *spec.stop_token_ids}) if spec.min_tokens > 0 else []


class RequestState:
    """The rows' tensors and the host's half of them. Rows are taken and given back by plans alone."""

    def __init__(self, num_rows: int, max_seq_len: int, max_blocks: Sequence[int], device: torch.device) -> None:
        """max_blocks: entries of a row's block table, per KV group."""
        sizes = [RECORD_WORDS, max_seq_len, *max_blocks, MAX_BANNED_IDS, MAX_BIAS_IDS, MAX_BIAS_IDS]
        num_words = num_rows * sum(sizes)
        list_words = round_up(num_rows + 1, LIST_ALIGNMENT)
        self.words = lazy_zeros(
            (round_up(num_words, LIST_ALIGNMENT) + len(STEP_LISTS) * list_words,), torch.int32, device
        )
        """Every region below, one after another, each [num_rows, size]; then the step lists."""
        self.list_starts = {
            name: round_up(num_words, LIST_ALIGNMENT) + index * list_words for index, name in enumerate(STEP_LISTS)
        }
        self._sizes = sizes
        self._starts = [num_rows * sum(sizes[:i]) for i in range(len(sizes))]
        regions = [
            self.words[start : start + num_rows * size].view(num_rows, size)
            for start, size in zip(self._starts, sizes, strict=True)
        ]
        self.records = regions[0]
        """int32 [num_rows, RECORD_WORDS]; the float columns are read through a float view of what is gathered."""
        self.num_computed_tokens = self.records[:, NUM_COMPUTED]
        self.num_tokens = self.records[:, NUM_TOKENS]
        self.num_prompt_tokens = self.records[:, NUM_PROMPT]
        self.token_ids = regions[1]
        """int32 [num_rows, max_seq_len]: prompt, then output."""
        self.block_tables = regions[2 : 2 + len(max_blocks)]
        self.banned_ids, self.bias_ids = regions[-3], regions[-2]
        """int32; -1 is no entry."""
        self.bias_values = regions[-1].view(torch.float32)
        self.banned_ids.fill_(-1)
        self.bias_ids.fill_(-1)
        self.clear_step_lists()
        self.settings: list[RowSettings | None] = [None] * num_rows
        self.num_not_plain = self.num_prompt_scored = self.num_failed = 0
        """Rows held whose settings are not plain, want prompt log-probabilities, are in error: what a step without any
        need not look for."""
        self._ban_width = self._bias_width = 0

    def step_list(self, name: str, length: int) -> Tensor:
        """The first entries of a list in `STEP_LISTS`: int32 [length]."""
        start = self.list_starts[name]
        return self.words[start : start + length]

    def clear_step_lists(self) -> None:
        """Make the step's lists those of a step that is all padding."""
        size = self.records.shape[0]
        for name, value in (("rows", -1), ("query_start_loc", 0), ("sampled", 0), ("sample_rows", -1)):
            self.step_list(name, size + 1).fill_(value)

    def stage(self, plan: SchedulerOutput, words: StepWords) -> None:
        """Stage what a plan changes, in its order: rows freed, requests admitted, blocks appended."""
        for row in plan.freed_rows:
            self._settle(row, None)
        for admitted in plan.admitted:
            self._stage_admitted(admitted, words)
        for append in plan.appended_blocks:
            self._write(words, 2 + append.group, append.row, append.block_ids, append.start)

    def _stage_admitted(self, admitted: AdmittedRequest, words: StepWords) -> None:
        row, spec, settings = admitted.row, admitted.sampling, settings_of(admitted)
        self._settle(row, settings)
        for group, block_ids in enumerate(admitted.block_ids):
            self._write(words, 2 + group, row, block_ids)
        self._write(words, 0, row, _record(admitted, spec))
        self._write(words, 1, row, admitted.token_ids)
        if settings.num_banned:
            self._ban_width = max(self._ban_width, settings.num_banned)
            self._write(words, -3, row, _padded(banned_ids(spec), self._ban_width))
        if settings.num_bias:
            self._bias_width = max(self._bias_width, settings.num_bias)
            self._write(words, -2, row, _padded(list(spec.logit_bias), self._bias_width))
            self._write(words, -1, row, array("i", array("f", spec.logit_bias.values()).tobytes()))

    def _settle(self, row: int, settings: RowSettings | None) -> None:
        """Change the host's half of a row, and the counts with it."""
        for has, sign in ((self.settings[row], -1), (settings, 1)):
            if has is not None:
                self.num_not_plain += sign * (has.needs != 0)
                self.num_prompt_scored += sign * (has.prompt_logprobs is not None)
                self.num_failed += sign * (has.error is not None)
        self.settings[row] = settings

    def _write(self, words: StepWords, region: int, row: int, values: Sequence[int], start: int = 0) -> None:
        size = self._sizes[region]
        assert start + len(values) <= size, f"{start} + {len(values)} words do not fit in a row's {size}"
        words.write(self._starts[region] + row * size + start, values)


def _record(admitted: AdmittedRequest, spec: SamplingSpec) -> "array[int]":
    """A row's record as words."""
    return array(
        "i",
        _RECORD.pack(
            admitted.num_computed_tokens,
            len(admitted.token_ids),
            admitted.num_prompt_tokens,
            min(spec.min_tokens, 2**31 - 1),
            min(max(spec.top_k, 0), 2**31 - 1),
            spec.choice,
            spec.seed & 0xFFFFFFFFFFFFFFFF,
            spec.temperature,
            spec.top_p,
            spec.min_p,
            spec.repetition_penalty,
            spec.presence_penalty,
            spec.frequency_penalty,
        ),
    )


def _padded(ids: list[int], width: int) -> list[int]:
    """To the widest any row has had: a reader takes up to that many, and must not find an earlier request's."""
    return ids + [-1] * (width - len(ids))
