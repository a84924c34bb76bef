# SPDX-License-Identifier: Apache-2.0
"""Plain counters: what metrics and logs are made of."""

import msgspec


class Counters(msgspec.Struct):
    """Totals since start; they only grow."""

    num_steps: int = 0
    """Plans scheduled."""
    num_prefill_tokens: int = 0
    """Tokens computed as part of a prefill, recomputed ones included."""
    num_decode_tokens: int = 0
    """Tokens computed one a step."""
    num_output_tokens: int = 0
    """Tokens passed on to the front end."""
    num_added_requests: int = 0
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache, by requests on admission and on resumption."""
    num_prefix_hit_tokens: int = 0
    """Of these, tokens found."""
    num_offloaded_blocks: int = 0
    """Blocks copied from the device to the host, of every group."""
    num_onboarded_blocks: int = 0
    """Blocks that came back to the device."""
    num_fetched_blocks: int = 0
    """Blocks that came from the disk, or from elsewhere outside, to the host."""
    num_finished_requests: dict[str, int] = msgspec.field(
        default_factory=lambda: {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
    )
    """By finish reason."""


class SchedulerStats(msgspec.Struct, frozen=True):
    """What is true now, and the totals."""

    num_running: int
    num_waiting: int
    """Preempted ones included."""
    num_plans_in_flight: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that hold nothing."""
    num_cached_blocks: int
    """Blocks kept for reuse that no request uses: as good as free."""
    num_used_blocks: int
    """Blocks of running requests; those that share one count it once."""
    num_loading: int
    """Of those that wait, requests whose blocks are on their way."""
    num_host_blocks: int
    """Blocks of every group together that the host has room for."""
    num_used_host_blocks: int
    totals: Counters
