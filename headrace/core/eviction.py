# SPDX-License-Identifier: Apache-2.0
"""The order in which things are given up: a heap whose entries may be out of date."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

Rank = tuple[int, int, int]
"""Priority, last use, and a tie; smaller goes first."""


class EvictionQueue(Generic[T]):
    """Members by rank. One is put in whenever it may go, or its rank has changed; it need not be taken out."""

    __slots__ = ("_counter", "_entries", "_may_go", "_rank")

    def __init__(self, may_go: Callable[[T], bool], rank: Callable[[T], Rank]) -> None:
        self._may_go = may_go
        self._rank = rank
        self._entries: list[tuple[Rank, int, T]] = []
        self._counter = 0

    def push(self, member: T, num_members: int) -> None:
        """num_members: about as many as there can be; many more entries than that are sorted out."""
        self._counter += 1
        heapq.heappush(self._entries, (self._rank(member), self._counter, member))
        if len(self._entries) > 2 * num_members + 64:
            valid = {entry[2]: entry for entry in self._entries if self._is_valid(entry)}
            self._entries = list(valid.values())
            heapq.heapify(self._entries)

    def peek(self) -> T | None:
        """The first to go; None: nothing may."""
        while self._entries and not self._is_valid(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def pop(self) -> T:
        """Take out the first to go. The caller knows that there is one."""
        member = self.peek()
        assert member is not None, "nothing may go"
        heapq.heappop(self._entries)
        return member

    def _is_valid(self, entry: tuple[Rank, int, T]) -> bool:
        return self._may_go(entry[2]) and self._rank(entry[2]) == entry[0]

    def members(self) -> set[T]:
        """All that may go."""
        return {entry[2] for entry in self._entries if self._is_valid(entry)}
