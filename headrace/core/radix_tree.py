# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: a radix tree over blocks of tokens.

A node is one block of tokens after those of its ancestors, and owns the blocks that hold their KV, one per group.
Whoever uses a node pins the whole way up to the root, so an unpinned node has only unpinned descendants: all of them
can be given up, leaves first. In a windowed group a sequence needs the last few blocks only; each is held on its own,
may be given up while the way is pinned, and leaves a hole. What goes first is of the lowest priority, then the least
recently used. With host memory (`core/host_tier.py`), what the device gives up stays in the tree while the host has a
copy: below what is on the device hangs what is on the host only.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from headrace.core.block_hash import child_hash, root_hash
from headrace.core.block_pool import BlockPool
from headrace.core.eviction import EvictionQueue
from headrace.core.host_tier import HostTier
from headrace.core.kv_events import Block, EventLog
from headrace.core.node import HOLE, Key, Node
from headrace.core.retention import DEFAULT_PRIORITY

MAX_SIBLINGS = 4096
"""Children of one node that a partial match looks at."""


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
        self.host: HostTier | None = None
        self.tokens_per_block = tokens_per_block
        self.num_nodes = 0
        """Nodes that own blocks: roots not counted, detached ones counted."""
        windows = [group.window for group in pool.layout.groups]
        self._pool = pool
        self._now = now
        self._whole = [index for index, window in enumerate(windows) if window is None]
        """Groups without a window; there is one."""
        assert self._whole, "where every layer has a window, blocks stay as long as their sequence"
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
        """The deepest node, at most `max_blocks` deep, from which `token_ids` can be gone on with now. See `find`."""
        return self.find(token_ids, extra_key, max_blocks)[0]

    def find(self, token_ids: list[int], extra_key: Key, max_blocks: int) -> tuple[Node, Node]:
        """The deepest node, at most `max_blocks` deep, from which `token_ids` can be gone on with: all its way is
        on the device, of windowed groups as much as the next token sees; and the deepest of which that will be so once
        what the host has is back. The root where there is none."""
        node = now = later = self.root(extra_key)
        size, windowed = self.tokens_per_block, self._windowed
        last_holes = dict.fromkeys([index for index, _ in windowed], 0)
        last_lacks = dict(last_holes)
        for start in range(0, min(max_blocks, len(token_ids) // size) * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
            for index, _ in windowed:
                if node.block_ids[index] == HOLE:
                    last_holes[index] = node.depth
                    if not is_there(node, index):
                        last_lacks[index] = node.depth
            if not windowed or self._is_seen(node.depth, last_lacks):
                later = node
                if node.is_on_device and (not windowed or self._is_seen(node.depth, last_holes)):
                    now = node
        return now, later

    def _is_seen(self, depth: int, last_holes: dict[int, int]) -> bool:
        """Whether the token after `depth` blocks sees no hole in any group."""
        end = depth * self.tokens_per_block
        return all(self.first_block(end, window) >= last_holes[index] for index, window in self._windowed)

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
                if each.host is not None and self.host is not None:
                    self.host.num_clean -= 1
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
                if self.host is not None:
                    self._note_let_go(each, self.host)
            else:
                self.drop_if_bare(each)

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
        old: tuple[int, int] | None = None
        if node is None:
            node = self._add_child(parent, key, list(block_ids))
            parent.num_device_children += 1
        else:
            old = level_of(node), node.priority
            self._take_over(node, block_ids)
        if node.holds is not None:
            for index, _ in self._windowed:
                node.holds[index] = int(block_ids[index] != HOLE)
        self._note_owner(node)
        node.num_pins += 1
        self._set_priority(node, priority, duration_ms)
        self._tell(node, old)
        return node

    def _add_child(self, parent: Node, key: Key, block_ids: list[int]) -> Node:
        node = parent.children[key] = Node(parent, key, block_ids, parent.depth + 1)
        self.num_nodes += 1
        if self._windowed:
            node.holds, node.last_held = [0] * len(block_ids), [0] * len(block_ids)
        return node

    def _take_over(self, node: Node, block_ids: Sequence[int]) -> None:
        """Give a node that nobody pins these blocks, instead of what it has."""
        assert node.num_pins == 0 and node.parent is not None, "a node in use keeps its blocks"
        for index in range(len(node.block_ids)):
            if block_ids[index] != HOLE or index in self._whole:
                self._free_block(node, index)
                node.block_ids[index] = block_ids[index]
        if not node.is_on_device:
            node.is_on_device = True
            node.parent.num_device_children += 1
        elif node.host is not None and self.host is not None:
            # It is about to be pinned.
            self.host.num_clean -= 1

    def _note_owner(self, node: Node) -> None:
        if self._owners is not None:
            for index, block_id in enumerate(node.block_ids):
                if block_id != HOLE:
                    self._owners[index][block_id] = node

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
            self._free_block(self._loose[index].pop(), index)
        else:
            self._give_up_node(self._leaves.pop())

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
            else:
                for each in reversed(self._below(node)):
                    if each.is_on_device and each.parent is not None:
                        self._give_up_node(each)

    def _give_up_node(self, node: Node) -> None:
        """Free the device's blocks of an unpinned node, under which nothing is on the device."""
        if node.host is None or self.host is None:
            self._remove_subtree(node)
            return
        self.host.num_clean -= 1
        node.is_on_device = False
        for index in range(len(node.block_ids)):
            self._free_block(node, index)
        self._tell(node, (0, node.priority))
        self._left_device(node)

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
        # Whoever gets them writes to them.
        node.stale_groups = None if node.stale_groups is None else -1
        self._remove_subtree(node)
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

    def _tell(self, node: Node, old: tuple[int, int] | None) -> None:
        """An event for a node that is new (None), or had another level and priority."""
        if self.events is None or not node.is_in_tree:
            return
        assert node.parent is not None
        block = Block(self.hash_of(node), node.key, level_of(node), node.priority)
        parent = node.parent.hash if node.parent.depth else None
        salt = node.root.key[0] if node.root.key else None
        if old is None:
            self.events.stored(parent, [block], cache_salt=salt)
        else:
            self.events.updated(parent, block, old_cache_level=old[0], old_priority=old[1], cache_salt=salt)

    # Inside

    def _lost_copy(self, parent: Node) -> None:
        parent.num_host_children -= 1
        if self.host is not None:
            self.host.note(parent)

    @staticmethod
    def _note_let_go(node: Node, host: HostTier) -> None:
        """Nobody pins a node of the device any more."""
        if node.host is None:
            host.queue_copy(node)
        else:
            host.num_clean += 1
            host.note(node)

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
        if node.is_leaf:
            self._leaves.push(node, self.num_nodes)

    def _free_block(self, node: Node, index: int) -> None:
        block_id = node.block_ids[index]
        if block_id != HOLE:
            self._pool.free(index, (block_id,))
            node.block_ids[index] = HOLE
            if node.stale_groups is not None:
                node.stale_groups |= 1 << index
            if self._owners is not None:
                del self._owners[index][block_id]

    def _remove_subtree(self, top: Node) -> None:
        """Take `top` and all below it out; pinned ones are detached."""
        if top.parent is None:
            return
        self._cut(top)
        todo = [top]
        while todo:
            each = todo.pop()
            todo.extend(each.children.values())
            if each.host is not None and self.host is not None:
                self.host.drop(each)
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
        if self.events is not None:
            self.events.removed([self.hash_of(each) for each in self._below(node)])
        del parent.children[node.key]
        if node.host is not None:
            self._lost_copy(parent)
        if node.is_on_device:
            self._left_device(node)
        if not parent.depth and parent.num_pins == 0:
            self.drop_if_bare(parent)

    def _left_device(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.num_device_children -= 1
        self._note_leaf(parent)

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

    def drop_if_bare(self, root: Node) -> None:
        """Forget a root under which nothing hangs, unless it is pinned."""
        if not root.children and root.num_pins == 0 and self._roots.get(root.key) is root:
            del self._roots[root.key]

    # Priorities

    def _set_priority(self, node: Node, priority: int, duration_ms: int | None) -> None:
        node.priority = priority
        node.expires = None if duration_ms is None else self._now() + duration_ms / 1000
        if node.expires is not None:
            heapq.heappush(self._expiring, (node.expires, id(node), node))
        self._note_loose(node)
        if self.host is not None:
            self.host.note(node)

    def _expire(self) -> None:
        """Let priorities whose time is up fall back."""
        while self._expiring and self._expiring[0][0] <= self._now():
            expired, _, node = heapq.heappop(self._expiring)
            if node.expires != expired or node.parent is None:
                continue
            old = level_of(node), node.priority
            node.priority, node.expires = DEFAULT_PRIORITY, None
            self._tell(node, old)
            self._note_leaf(node)
            self._note_loose(node)
            if self.host is not None:
                self.host.note(node)

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
            assert node.is_detached or all((node.block_ids[i] != HOLE) == node.is_on_device for i in self._whole)
            assert node.is_on_device or (node.host is not None and node.num_pins == 0 and {*node.block_ids} == {HOLE})
            for index, nodes_of in loose.items():
                assert not self._is_loose(node, index) or node in nodes_of, "a block that nobody holds is lost"
            if node.is_detached:
                assert node.num_pins > 0 and node in self._detached
                continue
            assert node.parent.children.get(node.key) is node and not node.parent.is_detached
            assert node.num_pins >= sum(child.num_pins for child in node.children.values())
            assert node.num_device_children == sum(child.is_on_device for child in node.children.values())
            assert node.num_host_children == sum(child.host is not None for child in node.children.values())
            assert not node.is_on_device or not node.parent.depth or node.parent.is_on_device
            assert not node.is_leaf or node in leaves
        for root in self._roots.values():
            assert root.children or root.num_pins, "a root without use"


def level_of(node: Node) -> int:
    """Where it lies: 0 on the device, 1 on the host only."""
    return 0 if node.is_on_device else 1


def is_there(node: Node, index: int) -> bool:
    """Whether the block of a group is on the device or the host."""
    return node.block_ids[index] != HOLE or (node.host is not None and bool(node.host.groups >> index & 1))
