# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: a radix tree over whole blocks of tokens.

A node is one block of tokens after those of its ancestors, and owns the blocks that hold their KV (one per group).
Whoever uses a node pins the whole way up to the root, so an unpinned node has only unpinned descendants: all of them
can be evicted, leaves first, least recently used first.
"""

import heapq
from collections.abc import Hashable, Iterator, Sequence

BlockIds = tuple[int, ...]
"""The blocks of one node, one per KV group."""

ROOT_BLOCKS: BlockIds = ()


class Node:
    """A block of tokens. Equal by identity."""

    __slots__ = ("block_ids", "children", "depth", "is_detached", "key", "last_used", "num_pins", "parent")

    def __init__(self, parent: "Node | None", key: Hashable, block_ids: BlockIds, depth: int) -> None:
        self.parent = parent
        self.key = key
        """The tokens of the block; of a root, the extra key."""
        self.block_ids = block_ids
        self.depth = depth
        """Blocks from the root to here, this one included."""
        self.children: dict[Hashable, Node] = {}
        self.num_pins = 0
        self.last_used = 0
        self.is_detached = False
        """Cut off: never matched again, and given up as soon as nobody pins it."""

    def __lt__(self, other: "Node") -> bool:
        """For ties in the heap: the deeper one is evicted first."""
        return self.depth > other.depth


class RadixTree:
    """Blocks by content. Blocks enter with `insert`, and come out of `evict`, `unpin` and `discard` to be freed."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_nodes = 0
        """Nodes that own blocks: roots not counted, detached ones counted."""
        self.num_evictable = 0
        """Nodes nobody pins."""
        self._roots: dict[Hashable, Node] = {}
        self._detached: set[Node] = set()
        self._clock = 0
        # (last_used, node) of every unpinned leaf, and entries that are out of date.
        self._leaves: list[tuple[int, Node]] = []

    # Finding

    def root(self, extra_key: Hashable) -> Node:
        """Where requests with this extra key begin; pin it before anything else happens."""
        node = self._roots.get(extra_key)
        if node is None:
            node = self._roots[extra_key] = Node(None, extra_key, ROOT_BLOCKS, 0)
        return node

    def match(self, token_ids: list[int], extra_key: Hashable, max_blocks: int) -> Node:
        """The deepest node that `token_ids` leads to, at most `max_blocks` deep; the root if there is none."""
        node = self.root(extra_key)
        size = self.tokens_per_block
        for start in range(0, min(max_blocks, len(token_ids) // size) * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
        return node

    def path(self, node: Node) -> list[Node]:
        """The nodes from below the root down to `node`."""
        nodes = list(self._way_up(node))[:-1]
        nodes.reverse()
        return nodes

    # Using

    def pin(self, node: Node) -> None:
        """Keep `node` and its ancestors."""
        for each in self._way_up(node):
            if each.num_pins == 0 and each.depth:
                self.num_evictable -= 1
            each.num_pins += 1

    def unpin(self, node: Node) -> list[BlockIds]:
        """Undo one `pin`; they stay cached, as the most recently used. Gives the blocks of detached nodes, now gone."""
        self._clock += 1
        gone: list[BlockIds] = []
        for each in list(self._way_up(node)):
            each.num_pins -= 1
            assert each.num_pins >= 0, f"a node at depth {each.depth} is unpinned twice"
            if each.num_pins:
                continue
            if each.is_detached:
                self._remove(each, gone)
            elif each.depth:
                self.num_evictable += 1
                self._note_if_leaf(each, self._clock)
            else:
                self._drop_if_bare(each)
        return gone

    def insert(self, parent: Node, token_ids: Sequence[int], block_ids: BlockIds) -> tuple[Node, BlockIds | None]:
        """The child of a pinned `parent` for one block of tokens, pinned once; and blocks that are free now.

        A child there that nobody pins takes on `block_ids`, and gives up its own. One in use keeps its own: then
        `block_ids` stay the caller's. Otherwise the tree owns them from now on.
        """
        key = tuple(token_ids)
        assert len(key) == self.tokens_per_block, "a block of tokens that are not all known"
        given_up: BlockIds | None = None
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, block_ids, parent.depth + 1)
            self.num_nodes += 1
        elif node.num_pins == 0:
            self.num_evictable -= 1
            given_up, node.block_ids = node.block_ids, block_ids
        node.num_pins += 1
        return node, given_up

    @staticmethod
    def is_in_use(parent: Node, token_ids: Sequence[int]) -> bool:
        """Whether `parent` has a child for this block of tokens that somebody pins."""
        node = parent.children.get(tuple(token_ids))
        return node is not None and node.num_pins > 0

    # Giving up

    def evict(self, count: int) -> list[BlockIds]:
        """Give up the `count` least recently used nodes that nobody pins. The caller has checked `num_evictable`."""
        gone: list[BlockIds] = []
        while len(gone) < count:
            last_used, node = heapq.heappop(self._leaves)
            if self._is_unpinned_leaf(node) and node.last_used == last_used:
                self._cut(node)
                self.num_evictable -= 1
                self._remove(node, gone)
        return gone

    def discard(self, node: Node) -> list[BlockIds]:
        """Never match again the way from the root to `node`, and all that hangs on it: its KV is not to be trusted.

        What others pin is detached: it is theirs until they unpin it. Returns the blocks that are free at once.
        """
        gone: list[BlockIds] = []
        way = self.path(node)
        if not way or way[0].is_detached:
            return gone
        self._cut(way[0])
        todo = [way[0]]
        while todo:
            each = todo.pop()
            todo.extend(each.children.values())
            if each.num_pins == 0:
                self.num_evictable -= 1
                self._remove(each, gone)
            else:
                each.is_detached = True
                self._detached.add(each)
        return gone

    # Inside

    @staticmethod
    def _way_up(node: Node) -> Iterator[Node]:
        at: Node | None = node
        while at is not None:
            yield at
            at = at.parent

    def _is_unpinned_leaf(self, node: Node) -> bool:
        return node.num_pins == 0 and not node.children and node.parent is not None

    def _note_if_leaf(self, node: Node, last_used: int) -> None:
        node.last_used = last_used
        if not node.children:
            heapq.heappush(self._leaves, (last_used, node))
            if len(self._leaves) > 2 * self.num_nodes + 64:
                self._forget_old_entries()

    def _forget_old_entries(self) -> None:
        entries = {node: at for at, node in self._leaves if self._is_unpinned_leaf(node) and node.last_used == at}
        self._leaves = [(at, node) for node, at in entries.items()]
        heapq.heapify(self._leaves)

    def _cut(self, node: Node) -> None:
        """Take `node` from its parent's children; an unpinned parent may be a leaf now."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.num_pins == 0:
            if parent.depth:
                self._note_if_leaf(parent, parent.last_used)
            else:
                self._drop_if_bare(parent)

    def _remove(self, node: Node, gone: list[BlockIds]) -> None:
        """Forget a node that is out of the tree, and give up its blocks."""
        gone.append(node.block_ids)
        self.num_nodes -= 1
        self._detached.discard(node)
        node.parent = None

    def _drop_if_bare(self, root: Node) -> None:
        if not root.children and root.num_pins == 0 and self._roots.get(root.key) is root:
            del self._roots[root.key]

    # Checking

    def nodes(self) -> list[Node]:
        """Every node that owns blocks, detached ones last."""
        found: list[Node] = []
        todo = [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found + list(self._detached)

    def check_invariants(self) -> None:
        """Counts are what a recount gives; pins never end below an unpinned node; every unpinned leaf can be found."""
        nodes = self.nodes()
        assert len(set(nodes)) == len(nodes) == self.num_nodes
        assert sum(node.num_pins == 0 for node in nodes) == self.num_evictable
        entries = {(at, node) for at, node in self._leaves}
        for node in nodes:
            assert node.parent is not None and node.depth == node.parent.depth + 1
            if node.is_detached:
                assert node.num_pins > 0 and node in self._detached
                continue
            assert node.parent.children.get(node.key) is node and not node.parent.is_detached
            assert node.num_pins >= sum(child.num_pins for child in node.children.values())
            assert node.num_pins or node.children or (node.last_used, node) in entries
        for root in self._roots.values():
            assert root.children or root.num_pins, "a root without use"
