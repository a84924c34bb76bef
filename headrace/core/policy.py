# SPDX-License-Identifier: Apache-2.0
"""Who goes first: the order in which requests get their prefill, and the queue of those that wait.

A policy maps a request to a key, smaller first; equal levels of importance keep the order of arrival. A preempted
request keeps its arrival, which is before that of anyone still waiting, so it stands at the front of its level.
A policy that looks at the prefix cache (longest prefix first) puts the length it finds between level and arrival: the
key is made once, when the request joins the queue.
"""

import heapq
from collections.abc import Iterator
from typing import Protocol

from headrace.core.request import Request
from headrace.errors import ConfigError

Key = tuple[float, ...]


class Policy(Protocol):
    """An order over requests."""

    def level(self, request: Request) -> int:
        """How important it is: larger goes first, and is preempted last."""
        ...

    def key(self, request: Request) -> Key:
        """Its place in the order, smaller first; the arrival last, so that no two are equal."""
        ...


class FirstComeFirstServed:
    """The order of arrival, whatever the priority."""

    def level(self, request: Request) -> int:
        return 0

    def key(self, request: Request) -> Key:
        return (request.arrival,)


SECONDS_PER_LEVEL = 1.0
"""A level of priority lets a request overtake those that came so much earlier, and no others."""


class PriorityFirst:
    """Priority 0 to 100, larger first; the order of arrival within one priority.

    Nobody waits forever: a request is overtaken by newer ones of a priority that is larger by n for n times
    `SECONDS_PER_LEVEL` at most.
    """

    def level(self, request: Request) -> int:
        return request.priority

    def key(self, request: Request) -> Key:
        return (request.arrival_s - request.priority * SECONDS_PER_LEVEL, request.arrival)


POLICIES: dict[str, type[FirstComeFirstServed] | type[PriorityFirst]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
}


def make_policy(name: str) -> Policy:
    """The policy called `name`: fcfs or priority."""
    if name not in POLICIES:
        raise ConfigError(f"scheduler_config.waiting_queue_policy is {name!r}: use {' or '.join(map(repr, POLICIES))}.")
    return POLICIES[name]()


class WaitingQueue:
    """Requests in policy order. Finished ones leave with `remove`, at the cost of a dict entry, wherever they stand."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, Request]] = []
        self._members: dict[Request, int] = {}
        self._aside: list[Request] = []
        self.num_tokens = 0
        """Tokens of all that wait, as they were when they joined."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)

    def push(self, request: Request) -> None:
        self._members[request] = len(request.token_ids)
        self.num_tokens += len(request.token_ids)
        heapq.heappush(self._heap, (self._policy.key(request), request))

    def peek(self) -> Request | None:
        """The first in order; None when nobody waits."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Take out the first in order. The caller has peeked."""
        _, request = heapq.heappop(self._heap)
        self.num_tokens -= self._members.pop(request)
        return request

    def set_aside(self, request: Request) -> None:
        """Let the others go on before the first in order, until `bring_back`. It stays a member."""
        _, first = heapq.heappop(self._heap)
        assert first is request, "only the first in order is set aside"
        self._aside.append(request)

    def bring_back(self) -> None:
        """Put those set aside back where they belong."""
        for request in self._aside:
            if request in self._members:
                heapq.heappush(self._heap, (self._policy.key(request), request))
        self._aside.clear()

    def remove(self, request: Request) -> None:
        """Take out a request that will not come back."""
        self.num_tokens -= self._members.pop(request)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
