# SPDX-License-Identifier: Apache-2.0
"""A level's figures beside the least that the hardware could take: the share of the roofline of each phase."""

from typing import Any

from headrace.bench.roofline import Ceilings, Phase, Shape

ALONE = 1.5
"""Up to so many requests in flight a request's first token does not wait for others, and its time is the prefill's."""


def roofline_shares(shape: Shape, ceilings: Ceilings, level: dict[str, Any]) -> dict[str, Any] | None:
    """What a report says under `roofline`; None where nothing was answered.

    - decode: the least time of a step with as many sequences as were in flight, over the mean TPOT. Prefills that ran
      between make the share smaller.
    - prefill: the least time of the mean prompt over the mean TTFT; where requests wait for others, no share.
    - closed_loop: output tokens per second over those of all prefills and then all decode steps at their least times.
    """
    input_len, output_len = level["mean_input_len"], level["mean_output_len"]
    if not input_len or not output_len:
        return None
    share = level["cache"]["share"] or 0.0
    cached = min(share * input_len, input_len - 1)
    concurrency = level["concurrency"]
    users = level["mean_in_flight"] if concurrency is None else min(concurrency, level["num_requests"])
    users = max(users, 1.0)
    decode = shape.decode(ceilings, users, input_len + output_len / 2)
    prefill = shape.prefill(ceilings, input_len - cached, cached)
    best = shape.closed_loop(ceilings, users, input_len, output_len, cached)
    tpot, ttft = level["tpot_ms"], level["ttft_ms"]
    return {
        "sequences": users,
        "matrix_flops": dict(ceilings.matrix_flops),
        "decode": _entry(decode, tpot["mean"] if tpot else None),
        "prefill": _entry(prefill, ttft["mean"] if ttft and level["mean_in_flight"] <= ALONE else None),
        "closed_loop": {
            "ideal_output_tokens_per_s": best,
            "measured_output_tokens_per_s": level["output_tokens_per_s"],
            "share": level["output_tokens_per_s"] / best,
        },
    }


def _entry(phase: Phase, measured_ms: float | None) -> dict[str, Any]:
    ideal_ms = 1e3 * phase.seconds
    return {
        "ideal_ms": ideal_ms,
        "measured_ms": measured_ms,
        "share": ideal_ms / measured_ms if measured_ms else None,
        "bound": phase.bound,
        "gigabytes": phase.bytes_read / 1e9,
        "teraflop": phase.flops / 1e12,
    }


def step_split(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """Where the steps of a level went, from the engine's counters before and after it. Milliseconds per step."""
    steps = after["num_reconciled_steps"] - before["num_reconciled_steps"]
    if steps <= 0:
        return None
    begun, ended = before["step_times_s"], after["step_times_s"]
    spent = {part: 1e3 * (ended[part] - begun[part]) / steps for part in ended}
    wait = spent.pop("wait")
    old, new = before["totals"], after["totals"]
    return {
        "num_steps": steps,
        "wall_ms": 1e3 * seconds / steps,
        "host_ms": sum(spent.values()),
        "host_parts_ms": spent,
        "wait_ms": wait,
        "prefill_tokens_per_step": (new["num_prefill_tokens"] - old["num_prefill_tokens"]) / steps,
        "decode_tokens_per_step": (new["num_decode_tokens"] - old["num_decode_tokens"]) / steps,
        "num_preemptions": new["num_preemptions"] - old["num_preemptions"],
    }
