# SPDX-License-Identifier: Apache-2.0
"""A request as the core sees it: token ids, resolved settings and a status that changes through one door."""

from enum import Enum

import msgspec

from headrace.core.block_table import CLOSED, BlockTable
from headrace.core.retention import Retention
from headrace.errors import EngineError


class SamplingSpec(msgspec.Struct, frozen=True, array_like=True):
    """Sampling settings with every default resolved: what the worker needs to pick a token, and when to stop.

    Made by the front end out of `SamplingParams`; no field is None where "off" has a number.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Always set: a request without one is given a random seed. 64 bits, unsigned."""
    choice: int = 0
    """Index among the n choices of one prompt; random numbers are keyed by (seed, output position, choice)."""
    repetition_penalty: float = 1.0
    """Counts prompt and output tokens."""
    presence_penalty: float = 0.0
    """Counts output tokens only."""
    frequency_penalty: float = 0.0
    """Counts output tokens only."""
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be sampled before this many output tokens."""
    max_tokens: int = 1
    """Resolved: never over what `max_seq_len` leaves."""
    stop_token_ids: list[int] = []
    """The user's stop tokens: they end the request with this id as the stop reason."""
    eos_token_ids: list[int] = []
    """The model's end tokens; empty under `ignore_eos`."""
    logprobs: int | None = None
    """None: none. k: the sampled token's log-probability and the k most probable ones."""
    prompt_logprobs: int | None = None


class RequestStatus(Enum):
    """Where a request stands. RUNNING ones hold a row and blocks, the others neither."""

    WAITING = "waiting"
    LOADING = "loading"
    """It has been first in the queue, and waits for blocks on their way from the host or from outside storage."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "cancelled"
    FINISHED_ERROR = "error"


FINISHED = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_ERROR,
    }
)

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: FINISHED | {RequestStatus.RUNNING, RequestStatus.LOADING},
    RequestStatus.LOADING: FINISHED | {RequestStatus.WAITING, RequestStatus.PREEMPTED},
    RequestStatus.RUNNING: FINISHED | {RequestStatus.PREEMPTED},
    # Straight to finished: the results of plans launched before the preemption still count.
    RequestStatus.PREEMPTED: FINISHED | {RequestStatus.RUNNING, RequestStatus.LOADING},
    **dict.fromkeys(FINISHED, frozenset()),
}


class Request:
    """One sequence of tokens on its way through the scheduler (each of n choices is a request of its own).

    Three lengths, `num_computed_tokens <= num_launched_tokens <= num_known_tokens`:
    computed - KV is valid, its step's result has come back;
    launched - KV will be valid once every launched plan has run;
    known    - prompt and output tokens, those the device samples in launched plans included.
    """

    __slots__ = (
        "arrival",
        "arrival_s",
        "cache_key",
        "is_cold",
        "last_step_id",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_known_tokens",
        "num_launched_tokens",
        "num_loads",
        "num_plain_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "retention_wish",
        "row",
        "sampling",
        "status",
        "stop_token_ids",
        "table",
        "token_ids",
        "was_looked_up",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingSpec,
        *,
        priority: int = 50,
        cache_salt: str | None = None,
        cache_marks: tuple[str, ...] = (),
        retention: Retention | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.priority = priority
        """0 to 100, larger first; only the `priority` policy looks at it."""
        self.cache_key: tuple[str | None, ...] = (cache_salt, *cache_marks)
        """What must be equal, besides the tokens, for two requests to share KV: the user's salt, then whatever else
        changes the KV of equal tokens (an adapter, say)."""
        self.retention_wish = None if retention is None else (retention, len(prompt_token_ids))
        """How long its blocks should stay in the prefix cache, and the tokens of its prompt; None: as any."""

        self.status = RequestStatus.WAITING
        self.arrival = 0
        """Order of arrival, set by the scheduler."""
        self.arrival_s = 0.0
        """When it came, on the scheduler's clock."""
        self.row = -1
        """The row it holds on the device; -1: none."""
        self.table: BlockTable = CLOSED
        """Its blocks, while it runs. Only the KVCacheManager changes it."""

        self.token_ids = list(prompt_token_ids)
        """Prompt tokens, then output tokens as they come back."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + sampling.max_tokens
        self.stop_token_ids = frozenset(sampling.stop_token_ids) | frozenset(sampling.eos_token_ids)
        self.num_computed_tokens = 0
        self.num_launched_tokens = 0
        self.num_known_tokens = self.num_prompt_tokens
        self.num_plain_tokens = 0
        """While it decodes: until so many tokens are launched, no step need look at anything but their number."""
        self.last_step_id = 0
        """The last plan launched before it was preempted; 0: it never was."""
        self.num_loads = 0
        """Times that it has waited for blocks since it last ran."""
        self.was_looked_up = False
        """Whether outside storage has been asked for its blocks since it last ran."""
        self.is_cold = False
        """Looks nothing up in the prefix cache when it is next let in."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at first admission."""
        self.num_prompt_logprobs = 0
        """Prompt positions whose log-probabilities have been passed on."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_covered(self) -> bool:
        """Whether the launched plans bring all the output it may have: there is nothing left to schedule."""
        return self.num_known_tokens >= self.max_total_tokens

    def count_plain_tokens(self) -> None:
        """Set `num_plain_tokens`: up to the end of its blocks, or to the last token but one that it may launch."""
        self.num_plain_tokens = min(self.table.num_token_slots, self.max_total_tokens - 2)

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED

    @property
    def is_owed_prompt_logprobs(self) -> bool:
        """Whether prompt positions must be computed, not taken from the prefix cache, for their log-probabilities."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def move_to(self, status: RequestStatus) -> None:
        """The one door for status changes.

        Raises:
            EngineError: `status` cannot follow the present one.
        """
        if status not in TRANSITIONS[self.status]:
            raise EngineError(f"request {self.request_id}: {status.name} cannot follow {self.status.name}")
        self.status = status

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_prompt_tokens}+{self.num_output_tokens})"
