# SPDX-License-Identifier: Apache-2.0
"""When a request has said enough: stop tokens and lengths.

Stop strings are matched where text exists, by the front end, which then calls `Scheduler.finish`.
"""

from headrace.core.request import Request, RequestStatus


def check_stop(request: Request) -> RequestStatus | None:
    """How the newest output token ends the request; None where it goes on."""
    token_id = request.token_ids[-1]
    if token_id in request.stop_token_ids and request.num_output_tokens > request.sampling.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if len(request.token_ids) >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH
    return None


def stop_reason(request: Request) -> int | None:
    """The user's stop token that ended a FINISHED_STOPPED request; None where it was the model's own end token."""
    token_id = request.token_ids[-1]
    is_own_end = token_id in request.sampling.eos_token_ids
    return None if request.status is not RequestStatus.FINISHED_STOPPED or is_own_end else token_id
