# SPDX-License-Identifier: Apache-2.0
"""The prefix cache over two tiers: which nodes have a copy on the host, and how blocks come back to the device."""

from collections.abc import Sequence

from headrace.core.node import HOLE, Node
from headrace.core.radix_tree import RadixTree, is_there, level_of


class TieredTree(RadixTree):
    """A radix tree that may have host memory: `host` is set then."""

    def lacking(self, node: Node) -> list[tuple[Node, int]]:
        """What the device lacks of the way to `node`, to go on from there: nodes from the top, with a group each."""
        firsts = [0] * len(node.block_ids)
        for index, window in self._windowed:
            firsts[index] = self.first_block(node.depth * self.tokens_per_block, window)
        return [
            (each, index)
            for each in self.path(node)
            for index, first in enumerate(firsts)
            if each.depth > first and each.block_ids[index] == HOLE
        ]

    def insert_host(self, parent: Node, token_ids: Sequence[int], unit: int, groups: int) -> Node:
        """The child of `parent` for one block of tokens that the host has, in `unit`, and the tree has not.

        groups: as `HostCopy.groups`.
        """
        assert self.host is not None
        key = tuple(token_ids)
        assert key not in parent.children, "the tree has this block"
        node = self._add_child(parent, key, [HOLE] * len(self._pool.groups))
        node.is_on_device = False
        self.keep_copy(node, unit, groups)
        self._tell(node, None)
        return node

    def take_unit(self) -> int | None:
        """A unit of the host's, for a transfer; a copy that is worth less makes way. None: all are in use."""
        assert self.host is not None
        self._expire()
        victim = self.host.first_to_go()
        if victim is not None:
            self.drop_copy(victim)
        return self.host.take()

    def keep_copy(self, node: Node, unit: int, groups: int) -> None:
        """The host has a copy of `node` from now on."""
        assert self.host is not None and node.parent is not None
        self.host.keep(node, unit, groups)
        node.parent.num_host_children += 1

    def drop_copy(self, node: Node) -> None:
        """The host has no copy of `node` any more; what then is nowhere leaves the tree, with all that hangs on it."""
        assert self.host is not None and node.parent is not None
        if not node.is_on_device:
            self._remove_subtree(node)
            return
        self.host.drop(node)
        self._lost_copy(node.parent)

    def is_whole(self, groups: int) -> bool:
        """Whether a copy of these groups (bits) will do for a node."""
        return all(groups >> index & 1 for index in self._whole)

    def reach(self, parent: Node, there: Sequence[int]) -> list[int]:
        """Which blocks after `parent` to get from outside, so that a sequence can go on from there.

        there: of each block after it the groups that can be had, as bits. Returns of each, up to the last that is of
        use, the groups to get.
        """
        lacks = {}
        for index, _ in self._windowed:
            missing = (n.depth for n in reversed(self.path(parent)) if not is_there(n, index))
            lacks[index] = next(missing, 0)
        end = 0
        for count, groups in enumerate(there, 1):
            if not self.is_whole(groups):
                break
            lacks.update({index: parent.depth + count for index, _ in self._windowed if not groups >> index & 1})
            if self._is_seen(parent.depth + count, lacks):
                end = count
        wanted = [sum(1 << index for index in self._whole)] * end
        for index, window in self._windowed:
            first = self.first_block((parent.depth + end) * self.tokens_per_block, window)
            for place in range(max(0, first - parent.depth), end):
                wanted[place] |= 1 << index
        return wanted

    def take_in(self, node: Node, blocks: dict[int, int]) -> None:
        """Blocks of `node` have come to the device: used ones, by group. What it has itself by now is freed."""
        assert node.parent is not None
        was = level_of(node), node.priority
        for group, block_id in blocks.items():
            if node.block_ids[group] != HOLE:
                self._pool.free(group, (block_id,))
                continue
            node.block_ids[group] = block_id
            self._pool.cache(group, block_id)
        if not node.is_on_device:
            node.is_on_device = True
            node.parent.num_device_children += 1
            self._pool.clock += 1
            node.last_used = self._pool.clock
            if self.host is not None:
                self._note_let_go(node, self.host)
        self._note_owner(node)
        self._note_leaf(node)
        self._note_loose(node)
        self._tell(node, was)

    def touch(self, node: Node) -> None:
        """The way to `node` is used now, on the host."""
        assert self.host is not None
        self._pool.clock += 1
        for each in self._way_up(node):
            if each.is_on_device or not each.depth:
                break
            each.last_used = self._pool.clock
            self.host.note(each)
