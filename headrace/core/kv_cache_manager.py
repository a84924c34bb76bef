# SPDX-License-Identifier: Apache-2.0
"""Whose KV lies in which block: block tables over the block pool, and the prefix cache over them.

Knows sequences of tokens and their blocks; requests, budgets and order are the scheduler's. A block is free, or in a
block table, or in the radix tree (and then in as many block tables as pin it). A freed block may be handed out again
at once: workers carry plans out in launch order, so a late write of its last owner lands before its next owner's.
A group with a window keeps of each sequence only what its next token sees; the rest goes as soon as it is in the tree.
With host memory a block may also be on its way to the device (`Load`).
"""

import time
from collections.abc import Callable, Collection, Sequence

from headrace.core.block_hash import ExtraKey
from headrace.core.block_pool import BlockPool
from headrace.core.block_table import BlockTable
from headrace.core.host_tier import HostTier
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.node import HOLE, Node
from headrace.core.retention import DEFAULT_PRIORITY, Retention
from headrace.core.tiered_tree import TieredTree
from headrace.utils.math import cdiv

BlockCopy = tuple[int, int, int]
"""Group, source block, destination block."""


RetentionWish = tuple[Retention, int] | None
"""How a request wants its blocks kept, and the tokens of its prompt; None: as any."""


class Load:
    """Blocks on their way from the host to the device. Equal by identity."""

    __slots__ = ("node", "parts", "units")

    def __init__(self, node: Node, parts: list[tuple[Node, int, int]], units: dict[Node, int]) -> None:
        self.node = node
        """The deepest one on the device that they follow; pinned."""
        self.parts = parts
        """(node, group, block on the device), nodes from the top down."""
        self.units = units
        """Of each node, where it lies on the host; held."""


class KVCacheManager:
    """Opens, extends, commits and closes block tables."""

    def __init__(
        self,
        layout: CacheLayout,
        tokens_per_block: int,
        *,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = True,
        copy_on_partial_reuse: bool = True,
        max_tokens_in_flight: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_tokens_in_flight: of one sequence in launched plans; a windowed group keeps so many beyond its window."""
        self.layout = layout
        self.tokens_per_block = tokens_per_block
        self.enable_block_reuse = enable_block_reuse
        self.enable_partial_reuse = enable_partial_reuse
        self.copy_on_partial_reuse = copy_on_partial_reuse
        self.num_releases = 0
        """Times that tables gave up blocks: room that was not there can only have appeared if this has moved."""
        self.pool = BlockPool(layout)
        self.tree = TieredTree(tokens_per_block, self.pool, now)
        self.loads: dict[Load, None] = {}
        self._windows = [group.window for group in layout.groups]
        self._windowed = [(g, window) for g, window in enumerate(self._windows) if window is not None]
        self._max_tokens_in_flight = max_tokens_in_flight
        self._num_reserved = 0
        self._promised = [0] * len(layout.groups)
        """Blocks promised to open tables and not taken yet."""
        # A partial match is worth a copy from an eighth of a block on.
        self._least_part = max(1, tokens_per_block // 8)

    # Sizes

    @property
    def num_blocks(self) -> int:
        """Blocks of every group together that the arena holds."""
        return self.layout.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences need, in blocks of every group together, rounded up."""
        return cdiv(self._bytes([group.num_used for group in self.pool.groups]), self.layout.bytes_per_position)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks kept for reuse that nobody needs now, counted alike, rounded down to what is not used."""
        cached = cdiv(self._bytes([group.num_cached for group in self.pool.groups]), self.layout.bytes_per_position)
        return min(cached, self.num_blocks - self.num_used_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.num_blocks - self.num_used_blocks - self.num_cached_blocks

    @property
    def num_promised_blocks(self) -> int:
        """Blocks promised to open tables and not taken yet, of the group that has most."""
        return max(self._promised)

    def num_blocks_for(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.tokens_per_block)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` has room when it is alone."""
        return self._fits_alone(self.num_blocks_for(num_tokens))

    def most_tokens(self, num_tokens: int) -> int:
        """The longest that fits, of a sequence of `num_tokens` that does not."""
        low, high = 0, self.num_blocks_for(num_tokens)
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits_alone(middle) else (low, middle)
        return low * self.tokens_per_block

    def reserve(self, count: int) -> bool:
        """Whether a block more for each of `count` sequences can be had at once; if so, they are seen to it for the
        next `count` that are extended."""
        if not self.pool.can_have([count] * len(self._promised)):
            return False
        self._num_reserved = count
        return True

    # The life of a block table

    def open(
        self, token_ids: list[int], extra_key: ExtraKey, num_promised_tokens: int, *, spare: float, use_cache: bool
    ) -> BlockTable | None:
        """A table that begins with what the prefix cache has of `token_ids`, the last token never included.

        Room for `num_promised_tokens` is promised (others' promises, and `spare`, a share of all, kept aside), not
        taken. None: there is no such room, and nothing has changed.
        """
        finds = use_cache and self.enable_block_reuse
        size, tree = self.tokens_per_block, self.tree
        node = tree.match(token_ids, extra_key, (len(token_ids) - 1) // size if finds else 0)
        table = BlockTable(tree.root(extra_key), tree.path(node), len(self._promised), size)
        tree.pin(node)
        self._hold_window(table)
        table.num_promised_tokens = num_promised_tokens
        promised = self._promise_for(table)
        if not self._has_room(promised, spare):
            for group, first in enumerate(table.first):
                for each in table.nodes[first:] if self._windows[group] is not None else ():
                    tree.let_go(each, group)
            tree.unpin(node)
            return None
        self._set_promise(table, promised)
        if finds and self.enable_partial_reuse:
            self._open_part(table, token_ids)
        return table

    def num_tokens_that_fit(self, table: BlockTable, num_tokens: int) -> int:
        """The largest length up to `num_tokens` that `table` can be extended to now."""
        size = self.tokens_per_block
        low, high = table.num_token_slots // size, self.num_blocks_for(num_tokens)
        if high <= low or self._can_grow(high - low):
            return num_tokens
        while low + 1 < high:
            middle = (low + high) // 2
            fits = self._can_grow(middle - table.num_token_slots // size)
            low, high = (middle, high) if fits else (low, middle)
        return min(num_tokens, low * size)

    def extend(self, table: BlockTable, num_tokens: int) -> tuple[list[int], ...]:
        """Make room for `num_tokens`, giving up cached blocks where too few are free; the new blocks of each group.

        The caller has checked that they can be had.
        """
        count = self.num_blocks_for(num_tokens) - table.num_token_slots // self.tokens_per_block
        if count <= 0:
            return tuple([] for _ in table.block_ids)
        if len(self._promised) > 1:
            # What it takes in one group must not be what it needs for another.
            self._set_promise(table, [max(count, promised) for promised in table.promised])
            self._num_reserved = max(0, self._num_reserved - 1)
        counts = [count] * len(self._promised)
        added = tuple(self._take(group, counts, table.promised) for group in range(len(counts)))
        for block_ids, new in zip(table.block_ids, added, strict=True):
            block_ids += new
        table.num_token_slots += count * self.tokens_per_block
        self._set_promise(table, self._promise_for(table))
        return added

    @staticmethod
    def readable(table: BlockTable) -> tuple[list[int], ...]:
        """A copy of its block ids for the workers: block 0 where it holds none, which no kernel looks at."""
        return tuple([0] * first + ids[first:] for first, ids in zip(table.first, table.block_ids, strict=True))

    @staticmethod
    def copies(table: BlockTable) -> list[BlockCopy]:
        """The copies that give a table, extended for the first time, its cached tokens of a partly matching block.

        They must be carried out before the sequence runs, in the plan that admits it. `end_copies` follows.
        """
        node, place = table.part, len(table.nodes)
        if node is None:
            return []
        return [(group, block_id, table.block_ids[group][place]) for group, block_id in enumerate(node.block_ids)]

    def end_copies(self, table: BlockTable) -> None:
        """The plan with the table's copies is whole: from the next one on, their sources are anybody's."""
        node, table.part = table.part, None
        if node is not None:
            for group, _ in self._windowed:
                self.tree.let_go(node, group)
            self.tree.unpin(node)

    def commit(
        self, table: BlockTable, token_ids: list[int], num_computed_tokens: int, wish: RetentionWish = None
    ) -> None:
        """Put the blocks that are full of computed tokens into the prefix cache, for others to find at once.

        It stops where an equal block of somebody else is in use: pinning that one too would keep two where one is
        needed. `close` gets past it.
        """
        self._commit(table, token_ids, num_computed_tokens, wish, passes_used=False)
        for group, window in self._windowed:
            first = self.tree.first_block(num_computed_tokens, window)
            if first > table.first[group]:
                self._leave_window(table, group, first)
                self._set_promise(table, self._promise_for(table))
                self.num_releases += 1

    def close(
        self, table: BlockTable, token_ids: list[int], num_computed_tokens: int, wish: RetentionWish = None
    ) -> None:
        """Free its blocks, but for those full of computed tokens: they are kept in the prefix cache."""
        self._commit(table, token_ids, num_computed_tokens, wish, passes_used=True)
        self._close(table)

    def close_untrusted(self, table: BlockTable) -> None:
        """Free its blocks, whose KV may be wrong: all its tokens lead to in the prefix cache is discarded.

        What it found there on opening goes too, as that may be what is wrong. Others keep what they use.
        """
        self.tree.discard(table.node)
        self._close(table)

    def discard(self, token_ids: list[int], extra_key: ExtraKey) -> None:
        """Discard all that `token_ids` lead to in the prefix cache: its KV may be wrong."""
        size = self.tokens_per_block
        node = self.tree.root(extra_key)
        for start in range(0, len(token_ids) // size * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
        self.tree.pin(node)
        self.tree.discard(node)
        self.tree.unpin(node)

    # Blocks that come from the host

    def add_host(self, min_priority: int) -> None:
        """Nodes of at least this priority are copied to host memory before the device gives them up."""
        self.tree.host = HostTier(min_priority)

    def start_load(
        self, target: Node, lacking: list[tuple[Node, int]], num_promised_tokens: int, *, spare: float
    ) -> Load | None:
        """Take blocks for what the device lacks on the way to `target`.

        lacking: as `TieredTree.lacking` gives it. None: there is no room for that and the rest of
        `num_promised_tokens`, counted as by `open`.
        """
        host = self.tree.host
        assert host is not None
        counts = [0] * len(self._promised)
        for _, group in lacking:
            counts[group] += 1
        node = target
        while not node.is_on_device and node.parent is not None:
            node = node.parent
        self.tree.pin(node)
        num_blocks = max(0, self.num_blocks_for(num_promised_tokens) - node.depth)
        held = [self._blocks_held(group, num_promised_tokens) for group in range(len(counts))]
        wanted = [max(count, min(num_blocks, most)) for count, most in zip(counts, held, strict=True)]
        if not self._has_room(wanted, spare):
            self.tree.unpin(node)
            return None
        blocks = self._take_all(counts)
        units = {each: each.host.unit for each, _ in lacking if each.host is not None}
        load = Load(node, [(each, group, blocks[group].pop()) for each, group in lacking], units)
        self.loads[load] = None
        for each, unit in units.items():
            host.hold(unit)
            each.is_arriving = True
        return load

    def end_load(self, load: Load, failed: Collection[int]) -> int:
        """Its copies have ended; those in `failed` (indices into its parts) brought nothing. The blocks that came."""
        tree, host = self.tree, self.tree.host
        assert host is not None
        del self.loads[load]
        came: dict[Node, dict[int, int]] = {}
        bad: set[Node] = set()
        for index, (node, group, block_id) in enumerate(load.parts):
            came.setdefault(node, {})[group] = block_id
            if index in failed:
                bad.add(node)
        num_blocks = 0
        for node, blocks in came.items():
            node.is_arriving = False
            host.let_go(load.units[node], node)
            if node in bad and node.is_in_tree:
                # What came back is not what left: nobody asks for it again.
                tree.drop_copy(node)
            parent = node.parent
            if node in bad or node.is_detached or parent is None or not (parent.is_on_device or not parent.depth):
                for group, block_id in blocks.items():
                    self.pool.free(group, (block_id,))
                continue
            tree.take_in(node, blocks)
            num_blocks += len(blocks)
        tree.unpin(load.node)
        self.num_releases += 1
        return num_blocks

    # Promises

    def _blocks_held(self, group: int, num_tokens: int) -> int:
        """The most blocks of a group that a sequence has at once while it grows to `num_tokens`."""
        window = self._windows[group]
        if window is None:
            return self.num_blocks_for(num_tokens)
        # The window, what runs, and a block begun at either end.
        return min(self.num_blocks_for(num_tokens), self.num_blocks_for(window + self._max_tokens_in_flight) + 2)

    def _promise_for(self, table: BlockTable) -> list[int]:
        """Blocks that `table` may still take at once on its way to the length it was promised."""
        slots = table.num_token_slots // self.tokens_per_block
        lacking = max(0, self.num_blocks_for(table.num_promised_tokens) - slots)
        if not self._windowed:
            return [lacking] * len(table.promised)
        return [
            max(0, min(lacking, self._blocks_held(group, table.num_promised_tokens) - (slots - first)))
            for group, first in enumerate(table.first)
        ]

    def _set_promise(self, table: BlockTable, promised: list[int]) -> None:
        for group, count in enumerate(promised):
            self._promised[group] += count - table.promised[group]
        table.promised = promised

    def _fits_alone(self, num_blocks: int) -> bool:
        num_tokens = num_blocks * self.tokens_per_block
        slabs = [
            cdiv(self._blocks_held(group, num_tokens), layout.blocks_per_slab)
            for group, layout in enumerate(self.layout.groups)
        ]
        return sum(slabs) <= self.layout.num_slabs

    def _has_room(self, counts: Sequence[int], spare: float) -> bool:
        """Whether `counts` blocks of each group can be had beside what others were promised, and a share of all."""
        wanted = [
            new + old + int(spare * group.blocks_per_slab * self.layout.num_slabs / len(counts))
            for new, old, group in zip(counts, self._promised, self.layout.groups, strict=True)
        ]
        return self.pool.can_have(wanted)

    def _can_grow(self, count: int) -> bool:
        return self.pool.can_have([count] * len(self._promised))

    def _bytes(self, counts: Sequence[int]) -> int:
        return sum(n * group.block_stride for n, group in zip(counts, self.layout.groups, strict=True))

    # Taking blocks

    def _take_all(self, counts: list[int]) -> list[list[int]]:
        """Blocks of each group for what was promised nothing; the caller has checked that they can be had."""
        self._promised = [old + count for old, count in zip(self._promised, counts, strict=True)]
        taken = [self._take(group, counts, counts) for group in range(len(counts))]
        self._promised = [old - count for old, count in zip(self._promised, counts, strict=True)]
        return taken

    def _take(self, group: int, counts: list[int], own: list[int]) -> list[int]:
        """`counts[group]` blocks for somebody who has what `counts` say of the groups before, and will of the others.

        own: what they had been promised, before the first.
        """
        pool, count = self.pool.groups[group], counts[group]
        if len(self._promised) == 1:
            while pool.num_free < count:
                self.tree.give_up_one(0)
            return self.pool.take(0, count)
        taken: list[int] = []
        for num_left in range(count - 1, -1, -1):
            if not pool.open_mixed:
                # What they and the step's other decodes still need, and then also what others were promised.
                due = [self._num_reserved + (0 if g < group else n) for g, n in enumerate(counts)]
                due[group] += num_left - count
                promised = [self._num_reserved + promised for promised in self._promised]
                for g in range(group + 1):
                    promised[g] -= min(own[g], count - num_left if g == group else counts[g])
                wished = [max(both) for both in zip(due, promised, strict=True)]
                self._open_slab(group, wished if self.pool.can_have(wished) else due)
            taken += self.pool.take(group, 1)
        return taken

    def _open_slab(self, group: int, due: list[int]) -> None:
        """See to a free block of a group, by giving up what is worth least, so that `due` blocks can be had after."""
        pool, tree = self.pool.groups[group], self.tree
        if pool.num_to_spare > 0 and not self.pool.can_have(due, num_slabs_lent=1):
            # Not a slab more: the block must come from those in use.
            while not pool.open_mixed:
                tree.give_up_one(group)
            return
        while not (pool.open_mixed or pool.open_unused):
            own, other = tree.oldest_use(group), self._oldest_slab(group)
            if self.pool.free_slabs:
                self.pool.add_slab(group)
            elif other is None or (own is not None and own < other[0]):
                tree.give_up_one(group)
            else:
                _, theirs, slab = other
                per_slab = self.layout.groups[theirs].blocks_per_slab
                tree.give_up_blocks(theirs, range(slab * per_slab, (slab + 1) * per_slab))

    def _oldest_slab(self, group: int) -> tuple[int, int, int] | None:
        """Of other groups' slabs without a used block the one that is so longest: since when, its group, itself."""
        slabs = [
            (since, theirs, slab)
            for theirs, pool in enumerate(self.pool.groups)
            if theirs != group
            for slab, since in list(pool.unused_slabs.items())[:1]
        ]
        return min(slabs, default=None)

    # Windows

    def _hold_window(self, table: BlockTable) -> None:
        num_tokens = len(table.nodes) * self.tokens_per_block
        for group, window in self._windowed:
            table.first[group] = self.tree.first_block(num_tokens, window)
            for node in table.nodes[table.first[group] :]:
                self.tree.hold(node, group)

    def _leave_window(self, table: BlockTable, group: int, first: int) -> None:
        """Let go of a group's blocks before `first`."""
        block_ids, nodes = table.block_ids[group], table.nodes
        for place in range(table.first[group], first):
            if place < len(nodes) and nodes[place].block_ids[group] == block_ids[place]:
                self.tree.let_go(nodes[place], group)
            else:
                self.pool.free(group, (block_ids[place],))
        table.first[group] = max(table.first[group], first)

    # Parts of blocks

    def _open_part(self, table: BlockTable, token_ids: list[int]) -> None:
        """Find a block that begins as the sequence goes on, and reuse that beginning."""
        start = table.num_cached_tokens
        node, count = self.tree.match_part(table.node, token_ids[start : start + self.tokens_per_block])
        count = min(count, len(token_ids) - 1 - start)
        if node is None or count < self._least_part:
            return
        if self.copy_on_partial_reuse:
            self.tree.pin(node)
            for group, _ in self._windowed:
                self.tree.hold(node, group)
            # Pinned, it may take what the promise was made with.
            if self.pool.can_have(self._promised):
                table.part = node
            else:
                for group, _ in self._windowed:
                    self.tree.let_go(node, group)
                self.tree.unpin(node)
                return
        elif node.is_leaf and not node.children and self._may_steal(table):
            for block_ids, block_id in zip(table.block_ids, self.tree.steal(node), strict=True):
                block_ids.append(block_id)
            table.num_token_slots += self.tokens_per_block
            self._set_promise(table, self._promise_for(table))
        else:
            return
        table.num_cached_tokens += count

    def _may_steal(self, table: BlockTable) -> bool:
        """Whether promises can be kept when a cached block of each group is used by `table`, wherever they lie."""
        if len(self._promised) == 1:
            return True
        left = [promised - min(1, mine) for promised, mine in zip(self._promised, table.promised, strict=True)]
        return self.pool.can_have(left, num_slabs_lent=len(left))

    # Inside

    def _commit(
        self,
        table: BlockTable,
        token_ids: list[int],
        num_computed_tokens: int,
        wish: RetentionWish,
        *,
        passes_used: bool,
    ) -> None:
        """passes_used: go on where an equal block is in use, which then is pinned beside the table's own."""
        size, tree = self.tokens_per_block, self.tree
        if not self.enable_block_reuse:
            return
        for depth in range(len(table.nodes), num_computed_tokens // size):
            tokens = tuple(token_ids[depth * size : (depth + 1) * size])
            node = table.node
            if node.is_detached:
                return
            if tree.is_in_use(node, tokens):
                if not passes_used:
                    return
                child = node.children[tokens]
                child.num_pins += 1
                table.nodes.append(child)
                continue
            block_ids = [
                ids[depth] if depth >= table.first[group] else HOLE for group, ids in enumerate(table.block_ids)
            ]
            priority, duration_ms = DEFAULT_PRIORITY, None
            if wish is not None:
                priority, duration_ms = wish[0].of_block(depth * size, wish[1])
            table.nodes.append(tree.insert(node, tokens, block_ids, priority, duration_ms))

    def _close(self, table: BlockTable) -> None:
        self.end_copies(table)
        for group, first in enumerate(table.first):
            self.pool.free(group, self._private_blocks(table, group))
            if self._windows[group] is not None:
                for node, block_id in list(zip(table.nodes, table.block_ids[group], strict=False))[first:]:
                    if node.block_ids[group] == block_id:
                        self.tree.let_go(node, group)
        self.tree.unpin(table.node)
        self._set_promise(table, [0] * len(table.promised))
        self.num_releases += 1

    @staticmethod
    def _private_blocks(table: BlockTable, group: int) -> list[int]:
        """The table's blocks that are not the tree's: the tail, and, while it is closed, doubles of what others use."""
        block_ids, nodes, first = table.block_ids[group], table.nodes, table.first[group]
        shared = zip(block_ids[first : len(nodes)], nodes[first:], strict=True)
        doubles = [block_id for block_id, node in shared if block_id != node.block_ids[group]]
        return doubles + block_ids[max(first, len(nodes)) :]

    def check_invariants(self, tables: list[BlockTable]) -> None:
        """Every block is free, the tree's, or private to one of `tables` (all that are open), exactly once."""
        self.tree.check_invariants()
        pins: dict[Node, int] = {}
        holds: dict[tuple[Node, int], int] = {}
        for table in tables:
            assert table.nodes == self.tree.path(table.node)
            assert all(len(ids) * self.tokens_per_block == table.num_token_slots for ids in table.block_ids)
            parts = self.tree.path(table.part) if table.part is not None else []
            for node in table.nodes + parts:
                pins[node] = pins.get(node, 0) + 1
            for group, _ in self._windowed:
                held = list(zip(table.nodes, table.block_ids[group], strict=False))[table.first[group] :]
                for node in [node for node, block_id in held if node.block_ids[group] == block_id] + parts[-1:]:
                    holds[node, group] = holds.get((node, group), 0) + 1
        used: list[list[int]] = [[] for _ in self._windows]
        cached: list[list[int]] = [[] for _ in self._windows]
        for load in self.loads:
            for node in self.tree.path(load.node):
                pins[node] = pins.get(node, 0) + 1
            for _, group, block_id in load.parts:
                used[group].append(block_id)
        for node in self.tree.nodes():
            assert node.num_pins == pins.get(node, 0), "a pin without a table"
            for group, window in enumerate(self._windows):
                num_holds = pins.get(node, 0) if window is None else holds.get((node, group), 0)
                assert window is None or (node.holds is not None and node.holds[group] == num_holds)
                if node.block_ids[group] != HOLE:
                    (used if num_holds else cached)[group].append(node.block_ids[group])
        for group in range(len(used)):
            for table in tables:
                used[group] += self._private_blocks(table, group)
            assert self._promised[group] == sum(table.promised[group] for table in tables)
        self.pool.check_invariants(used, cached)
