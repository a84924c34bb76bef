# SPDX-License-Identifier: Apache-2.0
"""Statuses change through one door, which refuses the illegal; policies order as they say."""

import pytest

from headrace.core.policy import WaitingQueue, make_policy
from headrace.core.request import FINISHED, Request, RequestStatus, SamplingSpec
from headrace.errors import EngineError

LEGAL = {
    (RequestStatus.WAITING, RequestStatus.RUNNING),
    (RequestStatus.RUNNING, RequestStatus.PREEMPTED),
    (RequestStatus.PREEMPTED, RequestStatus.RUNNING),
    (RequestStatus.WAITING, RequestStatus.LOADING),
    (RequestStatus.PREEMPTED, RequestStatus.LOADING),
    (RequestStatus.LOADING, RequestStatus.WAITING),
    (RequestStatus.LOADING, RequestStatus.PREEMPTED),
    *((alive, end) for alive in RequestStatus if alive not in FINISHED for end in FINISHED),
}


def make_request(request_id: str = "a", priority: int = 50, arrival: int = 0) -> Request:
    request = Request(request_id, [1, 2], SamplingSpec(), priority=priority)
    request.arrival = arrival
    return request


@pytest.mark.parametrize("before", RequestStatus)
@pytest.mark.parametrize("after", RequestStatus)
def test_only_legal_transitions_pass(before: RequestStatus, after: RequestStatus) -> None:
    request = make_request()
    request.status = before
    if (before, after) in LEGAL:
        request.move_to(after)
        assert request.status is after
    else:
        with pytest.raises(EngineError, match=f"{after.name} cannot follow {before.name}"):
            request.move_to(after)
        assert request.status is before


def test_a_request_does_not_share_its_tokens_with_whoever_made_it() -> None:
    prompt = [1, 2]
    request = Request("a", prompt, SamplingSpec())
    request.token_ids.append(3)
    assert prompt == [1, 2]


def test_what_changes_the_kv_of_equal_tokens_keeps_requests_apart() -> None:
    keys = [
        Request("a", [1], SamplingSpec()).cache_key,
        Request("a", [1], SamplingSpec(), cache_salt="").cache_key,
        Request("a", [1], SamplingSpec(), cache_salt="x").cache_key,
        Request("a", [1], SamplingSpec(), cache_marks=("x",)).cache_key,
    ]
    assert len(set(keys)) == 4


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "bdac")])
def test_the_queue_gives_its_policys_order(policy: str, order: str) -> None:
    queue = WaitingQueue(make_policy(policy))
    for arrival, (name, priority) in enumerate([("a", 1), ("b", 9), ("c", 1), ("d", 9)]):
        queue.push(make_request(name, priority, arrival))
    assert "".join(queue.pop().request_id for _ in range(4)) == order


def test_requests_leave_the_queue_wherever_they_stand_and_take_no_room_afterwards() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    requests = [make_request(str(i), arrival=i) for i in range(1000)]
    for request in requests:
        queue.push(request)
    for request in requests[:-1]:
        queue.remove(request)
    assert queue.peek() is requests[-1] and len(queue) == 1
    assert len(queue._heap) < 100
    queue.remove(requests[-1])
    assert queue.peek() is None
