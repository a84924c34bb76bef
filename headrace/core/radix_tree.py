# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: a radix tree over blocks of tokens.

A node is one block of tokens after those of its ancestors, and owns the blocks that hold their KV, one per group.
Whoever uses a node pins the whole way up to the root, so an unpinned node has only unpinned descendants: all of them
can be given up, leaves first. In a windowed group a sequence needs the last few blocks only; each is held on its own,
may be given up while the way is pinned, and leaves a hole. What goes first is of the lowest priority, then the least
recently used.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from headrace.core.block_hash import child_hash, root_hash
from headrace.core.block_pool import BlockPool
from headrace.core.eviction import EvictionQueue
from headrace.core.kv_events import Block, EventLog
from headrace.core.retention import DEFAULT_PRIORITY

Key = tuple[Any, ...]
"""Of a node the tokens of its block, of a root the extra key."""

HOLE = -1
"""In the place of a block that a windowed group does not keep."""

MAX_SIBLINGS = 4096
"""Children of one node that a partial match looks at."""


class Node:
    """A block of tokens. Equal by identity."""

    __slots__ = (
        "block_ids",
        "children",
        "depth",
        "expires",
        "hash",
        "holds",
        "is_detached",
        "key",
        "last_held",
        "last_used",
        "num_pins",
        "parent",
        "priority",
        "root",
    )

    def __init__(self, parent: "Node | None", key: Key, block_ids: list[int], depth: int) -> None:
        self.parent = parent
        self.root: Node = self if parent is None else parent.root
        self.key = key
        """The tokens of the block; of a root, the extra key."""
        self.block_ids = block_ids
        """Per group; HOLE where a windowed one keeps none."""
        self.hash: bytes | None = None
        """Its name outside (`core/block_hash.py`), once somebody has asked for it."""
        self.depth = depth
        """Blocks from the root to here, this one included."""
        self.children: dict[Key, Node] = {}
        self.num_pins = 0
        self.holds: list[int] | None = None
        """Per group, how many sequences have this block in their window; None where no group has a window."""
        self.last_held: list[int] | None = None
        """Per group, when the last of these let go of it."""
        self.last_used = 0
        self.priority = DEFAULT_PRIORITY
        self.expires: float | None = None
        """When its priority falls back to the default."""
        self.is_detached = False
        """Cut off: never matched again, and given up as soon as nobody pins it."""

    @property
    def is_leaf(self) -> bool:
        return self.num_pins == 0 and not self.children and self.parent is not None


class RadixTree:
    """Blocks by content. Blocks enter used, with `insert`; the tree moves them between used, cached and free."""

    def __init__(
        self,
        tokens_per_block: int,
        pool: BlockPool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.events: EventLog | None = None
        """Told what can be found, and what no longer can."""
        self.tokens_per_block = tokens_per_block
        self.num_nodes = 0
        """Nodes that own blocks: roots not counted, detached ones counted."""
        windows = [group.window for group in pool.layout.groups]
        self._pool = pool
        self._now = now
        self._whole = [index for index, window in enumerate(windows) if window is None]
        """Groups without a window."""
        self._windowed = [(index, window) for index, window in enumerate(windows) if window is not None]
        self._roots: dict[Key, Node] = {}
        self._detached: set[Node] = set()
        self._owners: list[dict[int, Node]] | None = [{} for _ in windows] if len(windows) > 1 else None
        self._leaves: EvictionQueue[Node] = EvictionQueue(
            lambda node: node.is_leaf, lambda node: (node.priority, node.last_used, -node.depth)
        )
        self._loose = {index: self._loose_queue(index) for index, _ in self._windowed}
        """Per windowed group, the blocks that nobody holds."""
        self._expiring: list[tuple[float, int, Node]] = []

    @staticmethod
    def _loose_queue(index: int) -> EvictionQueue[Node]:
        def rank(node: Node) -> tuple[int, int, int]:
            assert node.last_held is not None
            return node.priority, node.last_held[index], -node.depth

        return EvictionQueue(lambda node: RadixTree._is_loose(node, index), rank)

    # Finding

    def root(self, extra_key: Key) -> Node:
        """Where requests with this extra key begin; pin it before anything else happens."""
        node = self._roots.get(extra_key)
        if node is None:
            node = self._roots[extra_key] = Node(None, extra_key, [], 0)
        return node

    def match(self, token_ids: list[int], extra_key: Key, max_blocks: int) -> Node:
        """The deepest node, at most `max_blocks` deep, from which `token_ids` can be gone on with: all its way is
        there, of windowed groups as much as the next token sees. The root if there is none."""
        node = best = self.root(extra_key)
        size = self.tokens_per_block
        last_holes = dict.fromkeys([index for index, _ in self._windowed], 0)
        for start in range(0, min(max_blocks, len(token_ids) // size) * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
            if not self._windowed:
                best = node
                continue
            for index, _ in self._windowed:
                if node.block_ids[index] == HOLE:
                    last_holes[index] = node.depth
            if all(self.first_block(node.depth * size, w) >= last_holes[index] for index, w in self._windowed):
                best = node
        return best

    def match_part(self, node: Node, token_ids: Sequence[int]) -> tuple[Node | None, int]:
        """The child of `node` that begins with the most of `token_ids`, and how many tokens that is.

        It has blocks of all groups.
        """
        best, most = None, 0
        if not token_ids:
            return best, most
        first = token_ids[0]
        wanted = tuple(token_ids[: self.tokens_per_block])
        for key, child in islice(node.children.items(), MAX_SIBLINGS):
            if key[0] != first or HOLE in child.block_ids:
                continue
            count = 0
            for mine, theirs in zip(wanted, key, strict=False):
                if mine != theirs:
                    break
                count += 1
            if count > most:
                best, most = child, count
        return best, most

    def first_block(self, num_tokens: int, window: int) -> int:
        """The first block that the token at position `num_tokens` sees."""
        return max(0, num_tokens - window + 1) // self.tokens_per_block

    def path(self, node: Node) -> list[Node]:
        """The nodes from below the root down to `node`."""
        nodes = list(self._way_up(node))[:-1]
        nodes.reverse()
        return nodes

    # Using

    def pin(self, node: Node) -> None:
        """Keep `node` and its ancestors, and what groups without a window have there."""
        for each in self._way_up(node):
            if each.num_pins == 0 and each.depth:
                for index in self._whole:
                    self._pool.use(index, each.block_ids[index])
            each.num_pins += 1

    def unpin(self, node: Node) -> None:
        """Undo one `pin`; they stay cached, as the most recently used. Detached nodes are gone then."""
        self._pool.clock += 1
        clock = self._pool.clock
        for each in list(self._way_up(node)):
            each.num_pins -= 1
            assert each.num_pins >= 0, f"a node at depth {each.depth} is unpinned twice"
            if each.num_pins:
                continue
            if each.is_detached:
                self._remove(each)
            elif each.depth:
                for index in self._whole:
                    self._pool.cache(index, each.block_ids[index])
                each.last_used = clock
                self._note_leaf(each)
            else:
                self._drop_if_bare(each)

    def hold(self, node: Node, index: int) -> None:
        """Keep the block of windowed group `index`."""
        assert node.holds is not None
        if node.holds[index] == 0:
            self._pool.use(index, node.block_ids[index])
        node.holds[index] += 1

    def let_go(self, node: Node, index: int) -> None:
        """Undo one `hold`."""
        assert node.holds is not None and node.last_held is not None
        assert node.holds[index] > 0, "a block is let go of twice"
        node.holds[index] -= 1
        if node.holds[index] == 0:
            if node.is_detached:
                self._free_block(node, index)
                return
            self._pool.cache(index, node.block_ids[index])
            self._pool.clock += 1
            node.last_held[index] = self._pool.clock
            self._loose[index].push(node, self.num_nodes)

    def insert(
        self,
        parent: Node,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        priority: int = DEFAULT_PRIORITY,
        duration_ms: int | None = None,
    ) -> Node:
        """The child of a pinned `parent` for one block of tokens, pinned once.

        block_ids: used blocks, HOLE where a windowed group has none any more. The tree owns them from now on, each
        held once. A child there that nobody pins takes them on, and what it had is freed; one that is pinned must not
        be there (see `is_in_use`).
        """
        key = tuple(token_ids)
        assert len(key) == self.tokens_per_block, "a block of tokens that are not all known"
        node = parent.children.get(key)
        is_new = node is None
        if node is None:
            node = parent.children[key] = Node(parent, key, list(block_ids), parent.depth + 1)
            self.num_nodes += 1
            if self._windowed:
                node.holds, node.last_held = [0] * len(node.block_ids), [0] * len(node.block_ids)
        else:
            assert node.num_pins == 0, "a node in use keeps its blocks"
            for index in range(len(node.block_ids)):
                if block_ids[index] != HOLE or index in self._whole:
                    self._free_block(node, index)
                    node.block_ids[index] = block_ids[index]
        if node.holds is not None:
            for index, _ in self._windowed:
                node.holds[index] = int(block_ids[index] != HOLE)
        if self._owners is not None:
            for index, block_id in enumerate(node.block_ids):
                if block_id != HOLE:
                    self._owners[index][block_id] = node
        node.num_pins += 1
        old_priority = node.priority
        self._set_priority(node, priority, duration_ms)
        if self.events is not None:
            self._tell(node, None if is_new else old_priority)
        return node

    @staticmethod
    def is_in_use(parent: Node, token_ids: Sequence[int]) -> bool:
        """Whether `parent` has a child for this block of tokens that somebody pins."""
        node = parent.children.get(tuple(token_ids))
        return node is not None and node.num_pins > 0

    # Giving up

    def give_up_one(self, index: int) -> None:
        """Free the cached block of group `index` that is worth least, and what is useless without it."""
        self._expire()
        if index in self._loose:
            node = self._loose[index].pop()
            self._free_block(node, index)
            self._drop_if_empty(node)
        else:
            self._cut_and_remove(self._leaves.pop())

    def oldest_use(self, index: int) -> int | None:
        """The last use of what `give_up_one` would free; -1 for one of low priority, None where there is nothing."""
        node = self._loose.get(index, self._leaves).peek()
        if node is None:
            return None
        if node.priority < DEFAULT_PRIORITY:
            return -1
        return node.last_used if node.last_held is None or index in self._whole else node.last_held[index]

    def give_up_blocks(self, index: int, block_ids: Sequence[int]) -> None:
        """Free these cached blocks of group `index`, and what is useless without them."""
        assert self._owners is not None
        for block_id in block_ids:
            node = self._owners[index].get(block_id)
            if node is None:
                continue
            if index in self._loose:
                self._free_block(node, index)
                self._drop_if_empty(node)
            else:
                self._remove_subtree(node)

    def discard(self, node: Node) -> None:
        """Never match again the way from the root to `node`, and all that hangs on it: its KV is not to be trusted.

        What others pin is detached: it is theirs until they unpin it.
        """
        way = self.path(node)
        if not way or way[0].is_detached:
            return
        self._remove_subtree(way[0])

    def steal(self, node: Node) -> list[int]:
        """Take a leaf that nobody pins out of the tree: its blocks, used from now on, are the caller's."""
        assert node.is_leaf and HOLE not in node.block_ids
        block_ids = list(node.block_ids)
        for index, block_id in enumerate(block_ids):
            self._pool.use(index, block_id)
            if self._owners is not None:
                del self._owners[index][block_id]
            node.block_ids[index] = HOLE
        self._cut_and_remove(node)
        return block_ids

    # Names

    def hash_of(self, node: Node) -> bytes:
        """The node's name outside; those of its ancestors are found on the way."""
        unnamed = []
        at = node
        while at.hash is None and at.parent is not None:
            unnamed.append(at)
            at = at.parent
        if at.hash is None:
            at.hash = root_hash(at.key)
        last = at.hash
        for each in reversed(unnamed):
            last = each.hash = child_hash(last, each.key)
        return last

    def _tell(self, node: Node, old_priority: int | None) -> None:
        """An event for a node that is new (None), or had another priority."""
        assert self.events is not None and node.parent is not None
        block = Block(self.hash_of(node), node.key, 0, node.priority)
        parent = node.parent.hash if node.parent.depth else None
        salt = node.root.key[0] if node.root.key else None
        if old_priority is None:
            self.events.stored(parent, [block], cache_salt=salt)
        else:
            self.events.updated(parent, block, old_cache_level=0, old_priority=old_priority, cache_salt=salt)

    # Inside

    @staticmethod
    def _way_up(node: Node) -> Iterator[Node]:
        at: Node | None = node
        while at is not None:
            yield at
            at = at.parent

    @staticmethod
    def _is_loose(node: Node, index: int) -> bool:
        return node.holds is not None and node.holds[index] == 0 and node.block_ids[index] != HOLE

    def _note_leaf(self, node: Node) -> None:
        if not node.children:
            self._leaves.push(node, self.num_nodes)

    def _free_block(self, node: Node, index: int) -> None:
        block_id = node.block_ids[index]
        if block_id != HOLE:
            self._pool.free(index, (block_id,))
            node.block_ids[index] = HOLE
            if self._owners is not None:
                del self._owners[index][block_id]

    def _drop_if_empty(self, node: Node) -> None:
        """In a model whose groups all have windows: forget unpinned leaves without a block, and so on up."""
        at: Node | None = node
        while at is not None and at.is_leaf and at.depth and all(block_id == HOLE for block_id in at.block_ids):
            parent = at.parent
            self._cut_and_remove(at)
            at = parent

    def _cut_and_remove(self, node: Node) -> None:
        self._cut(node)
        self._remove(node)

    def _remove_subtree(self, top: Node) -> None:
        """Take `top` and all below it out; pinned ones are detached."""
        if top.parent is None:
            return
        self._cut(top)
        todo = [top]
        while todo:
            each = todo.pop()
            todo.extend(each.children.values())
            if each.num_pins == 0:
                self._remove(each)
            else:
                each.is_detached = True
                self._detached.add(each)
                # What nobody holds of it, nobody will.
                for index, _ in self._windowed:
                    if self._is_loose(each, index):
                        self._free_block(each, index)

    def _cut(self, node: Node) -> None:
        """Take `node` from its parent's children; an unpinned parent may be a leaf now."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if self.events is not None:
            self.events.removed([self.hash_of(each) for each in self._below(node)])
        if parent.num_pins == 0:
            if parent.depth:
                self._note_leaf(parent)
            else:
                self._drop_if_bare(parent)

    @staticmethod
    def _below(node: Node) -> list[Node]:
        """A node and all that hang on it, each after its parent."""
        found = [node]
        for each in found:
            found.extend(each.children.values())
        return found

    def _remove(self, node: Node) -> None:
        """Forget a node that is out of the tree, and free its blocks."""
        for index in range(len(node.block_ids)):
            self._free_block(node, index)
        self.num_nodes -= 1
        self._detached.discard(node)
        node.parent = None

    def _drop_if_bare(self, root: Node) -> None:
        if not root.children and root.num_pins == 0 and self._roots.get(root.key) is root:
            del self._roots[root.key]

    # Priorities

    def _set_priority(self, node: Node, priority: int, duration_ms: int | None) -> None:
        node.priority = priority
        node.expires = None if duration_ms is None else self._now() + duration_ms / 1000
        if node.expires is not None:
            heapq.heappush(self._expiring, (node.expires, id(node), node))
        self._note_loose(node)

    def _expire(self) -> None:
        """Let priorities whose time is up fall back."""
        while self._expiring and self._expiring[0][0] <= self._now():
            expired, _, node = heapq.heappop(self._expiring)
            if node.expires != expired or node.parent is None:
                continue
            old_priority, node.priority, node.expires = node.priority, DEFAULT_PRIORITY, None
            if self.events is not None and not node.is_detached:
                self._tell(node, old_priority)
            if node.is_leaf:
                self._note_leaf(node)
            self._note_loose(node)

    def _note_loose(self, node: Node) -> None:
        for index, queue in self._loose.items():
            if self._is_loose(node, index):
                queue.push(node, self.num_nodes)

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
        """Counts are what a recount gives; pins never end below an unpinned node; what can go can be found."""
        nodes = self.nodes()
        leaves, loose = self._leaves.members(), {index: queue.members() for index, queue in self._loose.items()}
        assert len(set(nodes)) == len(nodes) == self.num_nodes
        for node in nodes:
            assert node.parent is not None and node.depth == node.parent.depth + 1
            assert node.is_detached or all(node.block_ids[index] != HOLE for index in self._whole)
            for index, nodes_of in loose.items():
                assert not self._is_loose(node, index) or node in nodes_of, "a block that nobody holds is lost"
            if node.is_detached:
                assert node.num_pins > 0 and node in self._detached
                continue
            assert node.parent.children.get(node.key) is node and not node.parent.is_detached
            assert node.num_pins >= sum(child.num_pins for child in node.children.values())
            assert not node.is_leaf or node in leaves
        for root in self._roots.values():
            assert root.children or root.num_pins, "a root without use"
