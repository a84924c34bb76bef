# SPDX-License-Identifier: Apache-2.0
"""The host's memory for KV blocks: which places are taken, by which nodes of the prefix cache, and what goes first.

A unit is a place with room for a block of every group. It is free, holds a node's copy, or is in the hands of a
transfer; one that a transfer still reads or writes when its node is gone becomes free with the transfer's end.
"""

from collections import deque

from headrace.core.eviction import EvictionQueue
from headrace.core.node import HostCopy, Node

LEAST_QUEUED = 64


class HostTier:
    """Units of host memory. The tree decides which nodes have one."""

    def __init__(self, min_priority: int) -> None:
        """min_priority: nodes of a lower one are not copied."""
        self.min_priority = min_priority
        self.num_units = 0
        self.num_copies = 0
        self.num_clean = 0
        """Nodes that have a copy, are on the device, and are pinned by nobody: it can give them up for nothing."""
        self._free: list[int] = []
        self._busy: dict[int, int] = {}
        """Units that transfers read or write, with how many."""
        self._order: EvictionQueue[Node] = EvictionQueue(
            lambda node: node.host is not None and node.host.unit not in self._busy and not node.num_host_children,
            lambda node: (node.priority, node.last_used, -node.depth),
        )
        self._to_copy: deque[Node] = deque()
        self._to_store: deque[Node] = deque()
        self._most_queued = LEAST_QUEUED
        """Length at which `_to_copy` is rid of nodes that are not to be copied any more."""

    # Units

    def add_units(self, num_units: int) -> None:
        """Memory that has become usable: there are `num_units` in all now."""
        self._free += range(self.num_units, num_units)
        self.num_units = max(self.num_units, num_units)

    def first_to_go(self) -> Node | None:
        """The node whose copy is worth least; None where none may be given up, or need be: there is a free unit."""
        return None if self._free else self._order.peek()

    def take(self) -> int | None:
        """A free unit, held for a transfer; None: there is none."""
        if not self._free:
            return None
        unit = self._free.pop()
        self._busy[unit] = 1
        return unit

    def hold(self, unit: int) -> None:
        """A transfer reads it: it is not given up meanwhile."""
        self._busy[unit] = self._busy.get(unit, 0) + 1

    def let_go(self, unit: int, node: Node) -> None:
        """Undo one `take` or `hold`, for the sake of `node`: where that has no copy there, the unit is free."""
        self._busy[unit] -= 1
        if self._busy[unit]:
            return
        del self._busy[unit]
        if node.host is not None and node.host.unit == unit:
            self.note(node)
        else:
            self._free.append(unit)

    # Copies

    def keep(self, node: Node, unit: int, groups: int) -> None:
        """`unit`, which is held, has a copy of `node` from now on."""
        node.host = HostCopy(unit, groups)
        self.num_copies += 1
        self.num_clean += node.is_on_device and node.num_pins == 0

    def drop(self, node: Node) -> None:
        """Forget the copy of `node`."""
        copy, node.host = node.host, None
        assert copy is not None
        self.num_copies -= 1
        self.num_clean -= node.is_on_device and node.num_pins == 0
        if copy.unit not in self._busy:
            self._free.append(copy.unit)

    def note(self, node: Node) -> None:
        """The rank of `node` has changed, or it may go now and could not before."""
        if node.host is not None:
            self._order.push(node, self.num_copies)

    # What is to be done

    def queue_copy(self, node: Node) -> None:
        """`node` may be given up by the device from now on."""
        if not node.is_queued and node.priority >= self.min_priority:
            node.is_queued = True
            self._to_copy.append(node)
            if len(self._to_copy) >= self._most_queued:
                for each in self._to_copy:
                    each.is_queued = _is_to_copy(each)
                self._to_copy = deque(each for each in self._to_copy if each.is_queued)
                self._most_queued = 2 * len(self._to_copy) + LEAST_QUEUED

    def queue_store(self, node: Node) -> None:
        """Outside storage has not been given the copy of `node`."""
        self._to_store.append(node)
        if len(self._to_store) >= 2 * self.num_copies + LEAST_QUEUED:
            self._to_store = deque(dict.fromkeys(each for each in self._to_store if _is_to_store(each)))

    @property
    def can_copy(self) -> bool:
        """Whether there may be a node to copy, and a place for it."""
        return bool(self._to_copy) and (bool(self._free) or self._order.peek() is not None)

    def next_to_copy(self) -> Node | None:
        """The node without a copy that was let go of longest ago."""
        while self._to_copy:
            node = self._to_copy.popleft()
            node.is_queued = False
            if _is_to_copy(node):
                return node
        return None

    def next_to_store(self) -> Node | None:
        """A node on the host that outside storage has not been given."""
        while self._to_store:
            node = self._to_store.popleft()
            if _is_to_store(node):
                return node
        return None

    def check_invariants(self, nodes: list[Node], transfers: dict[int, int]) -> None:
        """Every unit is free, a node's or a transfer's.

        nodes: all there are. transfers: units that transfers hold, with how many.
        """
        copies = [node.host.unit for node in nodes if node.host is not None]
        assert len(set(copies)) == len(copies) == self.num_copies, "a unit has two owners"
        assert self._busy == transfers, "a unit is held for nobody"
        taken = {*copies, *transfers}
        assert sorted([*self._free, *taken]) == list(range(self.num_units)), "a unit is lost or owned twice"
        clean = [node for node in nodes if node.host is not None and node.is_on_device and node.num_pins == 0]
        assert self.num_clean == len(clean)
        may_go = self._order.members()
        for node in nodes:
            free_to_go = node.host is not None and node.host.unit not in self._busy and not node.num_host_children
            assert not free_to_go or node in may_go, "a copy that nobody needs is lost"


def _is_to_copy(node: Node) -> bool:
    is_unused = node.is_in_tree and node.is_on_device and node.num_pins == 0
    return is_unused and node.host is None and node.stale_groups is None


def _is_to_store(node: Node) -> bool:
    return node.host is not None and not node.host.is_stored
