# SPDX-License-Identifier: Apache-2.0
"""What a request gives back."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 is the most probable token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict per output token: the sampled token first, then the most probable ones, best first."""
    finish_reason: FinishReason | None = None
    """None while the answer still grows."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the answer; None where the model's own end token or a length did."""
    text_diff: str = ""
    """Text since the output before this one."""
    token_ids_diff: list[int] = field(default_factory=list)
    """Tokens since the output before this one."""
    logprobs_diff: list[dict[int, Logprob]] | None = None
    error: str | None = None
    """Why, where `finish_reason` is error."""

    @property
    def length(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids)


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far."""

    request_id: str
    prompt: str | None
    """The prompt's text; None where it came as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One per choice, in order of index."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One per prompt token; the first is None, since nothing comes before it."""
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was already there."""
