# SPDX-License-Identifier: Apache-2.0
"""What a step may hold, and what a request must find to be let in: the numbers the scheduler goes by."""

from dataclasses import dataclass

from headrace.config.resolve import ResolvedConfig
from headrace.core.prefill_budget import adaptive_budget
from headrace.core.request import Request
from headrace.errors import ConfigError, ContextLengthError, RequestError

CAPACITY_POLICIES = ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold, and how requests are let in."""

    max_batch_size: int
    """Requests that hold a row at a time."""
    max_num_tokens: int
    """Tokens of a step."""
    max_prefill_tokens: int
    """Prefill tokens of a step that also decodes: all that it may take, or the most (see `adapts_prefill`)."""
    max_seq_len: int
    """Prompt and output tokens of a request."""
    watermark: float = 0.01
    """Share of the blocks that admission leaves to those already running."""
    policy: str = "fcfs"
    capacity_policy: str = "MAX_UTILIZATION"
    """MAX_UTILIZATION admits what fits now, and preempts; GUARANTEED_NO_EVICT admits what can run to its end;
    STATIC_BATCH does so too, and admits none until all that were admitted together have ended."""
    enable_chunked_prefill: bool = True
    adapts_prefill: bool = False
    """Such a step takes what `prefill_budget.py` says, in token-equivalents."""
    attention_depth: int = 0
    """The position at which a token's attention costs as much as its products; 0: not known."""

    def __post_init__(self) -> None:
        for name, value in (
            ("max_batch_size", self.max_batch_size),
            ("max_prefill_tokens", self.max_prefill_tokens),
            ("max_seq_len", self.max_seq_len),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}: it must be at least 1.")
        if self.max_num_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_num_tokens ({self.max_num_tokens}) must be at least max_batch_size ({self.max_batch_size}): "
                "each running request decodes one token a step. Raise the first or lower the second."
            )
        if self.capacity_policy not in CAPACITY_POLICIES:
            raise ConfigError(
                f"scheduler_config.capacity_scheduler_policy is {self.capacity_policy!r}: "
                f"use {', '.join(map(repr, CAPACITY_POLICIES[:-1]))} or {CAPACITY_POLICIES[-1]!r}."
            )

    @classmethod
    def from_config(cls, config: ResolvedConfig) -> "SchedulerLimits":
        return cls(
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            max_seq_len=config.max_seq_len,
            watermark=config.watermark,
            policy=config.waiting_queue_policy,
            capacity_policy=config.policy,
            enable_chunked_prefill=config.enable_chunked_prefill,
            adapts_prefill=config.adapts_prefill,
            attention_depth=config.attention_depth,
        )

    def check(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            RequestError: an empty prompt, or max_tokens below 1.
            ContextLengthError: a prompt that leaves no room for one output token.
        """
        num_prompt_tokens, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
        if num_prompt_tokens == 0:
            raise RequestError("the prompt has no tokens: give at least one.", param="prompt")
        if max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}: it must be at least 1.", param="max_tokens")
        if num_prompt_tokens >= self.max_seq_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and max_seq_len is {self.max_seq_len}: "
                f"shorten it to {self.max_seq_len - 1} tokens or fewer.",
                param="prompt",
            )

    def prefill_budget(self, num_decodes: int, num_prompts: int, backlog: int) -> tuple[int, int]:
        """What prefill a step with `num_decodes` decodes may do, and the attention depth to count it with (0: none).

        num_prompts, backlog: requests whose prompt is not computed yet, and the tokens that they lack.
        """
        left = self.max_num_tokens - num_decodes
        # A prefill that must not be split cannot be made to fit the budget of mixed steps.
        if not self.enable_chunked_prefill:
            return left, 0
        if num_decodes == 0:
            # Prompts that come together begin to decode one after another: from then on steps are mixed.
            return (min(left, self.max_prefill_tokens) if self.adapts_prefill and num_prompts > 1 else left), 0
        if not self.adapts_prefill:
            return min(left, self.max_prefill_tokens), 0
        return min(left, adaptive_budget(num_decodes, backlog, self.max_prefill_tokens)), self.attention_depth

    def chunk_len(self, num_tokens: int, budget: int) -> int:
        """How many of a prefill's remaining tokens a step may run; what exceeds a whole step is always split."""
        if self.enable_chunked_prefill or num_tokens > self.max_num_tokens:
            return min(num_tokens, budget)
        return num_tokens if num_tokens <= budget else 0

    def num_promised_tokens(self, request: Request) -> int:
        """Tokens there must be room for to let a request in: all known ones, or all it may ever compute."""
        if self.capacity_policy != "MAX_UTILIZATION":
            return request.max_total_tokens - 1  # the last token is never computed
        return request.num_known_tokens
