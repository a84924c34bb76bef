# SPDX-License-Identifier: Apache-2.0
"""Whose KV lies in which block: block tables over a block pool per group, and the prefix cache over them.

Knows sequences of tokens and their blocks; requests, budgets and order are the scheduler's. A block is free, or in a
block table, or in the radix tree (and then in as many block tables as pin it). A freed block may be handed out again
at once: workers carry plans out in launch order, so a late write of its last owner lands before its next owner's.
"""

from collections.abc import Hashable

from headrace.core.block_pool import BlockPool
from headrace.core.radix_tree import BlockIds, Node, RadixTree
from headrace.utils.math import cdiv


class BlockTable:
    """The blocks of one running sequence, one list per group, all of one length."""

    __slots__ = ("block_ids", "node", "num_cached_tokens", "num_promised_blocks", "num_token_slots")

    def __init__(self, node: Node, block_ids: tuple[list[int], ...], num_promised_blocks: int, size: int) -> None:
        self.block_ids = block_ids
        self.node = node
        """The deepest node of the prefix cache on its way; the table pins it. `node.depth` blocks are committed."""
        self.num_promised_blocks = num_promised_blocks
        """Blocks it has been promised and not taken yet."""
        self.num_cached_tokens = node.depth * size
        """Leading tokens that were found in the prefix cache."""
        self.num_token_slots = node.depth * size
        """Tokens its blocks have room for."""


CLOSED = BlockTable(Node(None, None, (), 0), (), 0, 0)
"""The table of a request that does not run."""


class KVCacheManager:
    """Opens, extends, commits and closes block tables."""

    def __init__(
        self, num_blocks: int, tokens_per_block: int, *, num_groups: int = 1, enable_block_reuse: bool = True
    ) -> None:
        """`num_blocks` is the number of blocks of each group."""
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.enable_block_reuse = enable_block_reuse
        self.num_promised_blocks = 0
        """Blocks promised to open tables and not taken yet."""
        self.num_closings = 0
        """Tables closed so far: room that was not there can only have appeared if this has moved."""
        self.pools = [BlockPool(num_blocks) for _ in range(num_groups)]
        self.tree = RadixTree(tokens_per_block)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return min(pool.num_free for pool in self.pools)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks kept for reuse that nobody uses now."""
        return self.tree.num_evictable

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be had, by eviction if need be."""
        return self.num_free_blocks + self.tree.num_evictable

    def num_blocks_for(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.tokens_per_block)

    # The life of a block table

    def open(
        self, token_ids: list[int], extra_key: Hashable, num_promised_tokens: int, *, spare: int, use_cache: bool
    ) -> BlockTable | None:
        """A table that begins with what the prefix cache has of `token_ids`, the last token never included.

        Room for `num_promised_tokens` is promised (others' promises and `spare` blocks kept aside), not taken.
        None: there is no such room, and nothing has changed.
        """
        max_blocks = (len(token_ids) - 1) // self.tokens_per_block if use_cache and self.enable_block_reuse else 0
        node = self.tree.match(token_ids, extra_key, max_blocks)
        self.tree.pin(node)
        promised = self.num_blocks_for(num_promised_tokens) - node.depth
        if promised + self.num_promised_blocks + spare > self.num_available_blocks:
            self._free(self.tree.unpin(node))
            return None
        path = self.tree.path(node)
        block_ids = tuple([each.block_ids[group] for each in path] for group in range(len(self.pools)))
        self.num_promised_blocks += promised
        return BlockTable(node, block_ids, promised, self.tokens_per_block)

    def num_missing_blocks(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that `extend` takes."""
        return max(0, self.num_blocks_for(num_tokens) - table.num_token_slots // self.tokens_per_block)

    def num_tokens_that_fit(self, table: BlockTable, num_tokens: int) -> int:
        """The largest length up to `num_tokens` that `table` can be extended to now."""
        return min(num_tokens, table.num_token_slots + self.num_available_blocks * self.tokens_per_block)

    def extend(self, table: BlockTable, num_tokens: int) -> tuple[list[int], ...]:
        """Make room for `num_tokens`, evicting cached blocks where too few are free; the new blocks of each group.

        The caller has checked that they can be had.
        """
        count = self.num_missing_blocks(table, num_tokens)
        if count > self.num_free_blocks:
            self._free(self.tree.evict(count - self.num_free_blocks))
        added = tuple(pool.take(count) for pool in self.pools)
        for block_ids, new in zip(table.block_ids, added, strict=True):
            block_ids += new
        table.num_token_slots += count * self.tokens_per_block
        kept_promises = min(count, table.num_promised_blocks)
        table.num_promised_blocks -= kept_promises
        self.num_promised_blocks -= kept_promises
        return added

    def commit(self, table: BlockTable, token_ids: list[int], num_computed_tokens: int) -> None:
        """Put the blocks that are full of computed tokens into the prefix cache, for others to find at once.

        It stops where an equal block of somebody else is in use: pinning that one too would keep two where one is
        needed. `close` gets past it.
        """
        self._commit(table, token_ids, num_computed_tokens, passes_used=False)

    def close(self, table: BlockTable, token_ids: list[int], num_computed_tokens: int) -> None:
        """Free its blocks, but for those full of computed tokens: they are kept in the prefix cache."""
        self._commit(table, token_ids, num_computed_tokens, passes_used=True)
        self._close(table)

    def close_untrusted(self, table: BlockTable) -> None:
        """Free its blocks, whose KV may be wrong: all its tokens lead to in the prefix cache is discarded.

        What it found there on opening goes too, as that may be what is wrong. Others keep what they use.
        """
        discarded = self.tree.discard(table.node)
        self._close(table)
        self._free(discarded)

    def discard(self, token_ids: list[int], extra_key: Hashable) -> None:
        """Discard all that `token_ids` lead to in the prefix cache: its KV may be wrong."""
        node = self.tree.match(token_ids, extra_key, len(token_ids))
        self.tree.pin(node)
        self._free(self.tree.discard(node))
        self._free(self.tree.unpin(node))

    # Inside

    def _commit(self, table: BlockTable, token_ids: list[int], num_computed_tokens: int, *, passes_used: bool) -> None:
        """passes_used: go on where an equal block is in use, which then is pinned beside the table's own."""
        size, tree = self.tokens_per_block, self.tree
        if not self.enable_block_reuse:
            return
        for depth in range(table.node.depth, num_computed_tokens // size):
            tokens = tuple(token_ids[depth * size : (depth + 1) * size])
            if table.node.is_detached or (not passes_used and tree.is_in_use(table.node, tokens)):
                return
            block_ids = tuple([ids[depth] for ids in table.block_ids])
            table.node, given_up = tree.insert(table.node, tokens, block_ids)
            if given_up is not None:
                self._free([given_up])

    def _close(self, table: BlockTable) -> None:
        self._free(self._private_blocks(table))
        self._free(self.tree.unpin(table.node))
        self.num_promised_blocks -= table.num_promised_blocks
        table.num_promised_blocks = 0
        self.num_closings += 1

    def _private_blocks(self, table: BlockTable) -> list[BlockIds]:
        """The table's blocks that are not the tree's: the tail, and, while it is closed, doubles of what others use."""
        all_blocks: list[BlockIds] = list(zip(*table.block_ids, strict=True))
        path = self.tree.path(table.node)
        doubles = [mine for mine, node in zip(all_blocks, path, strict=False) if mine != node.block_ids]
        return doubles + all_blocks[len(path) :]

    def _free(self, blocks: list[BlockIds]) -> None:
        if blocks:
            for pool, block_ids in zip(self.pools, zip(*blocks, strict=True), strict=True):
                pool.give_back(list(block_ids))

    def check_invariants(self, tables: list[BlockTable]) -> None:
        """Every block is free, the tree's, or private to one of `tables` (all that are open), exactly once."""
        self.tree.check_invariants()
        owned = [node.block_ids for node in self.tree.nodes()]
        for table in tables:
            owned += self._private_blocks(table)
            assert all(len(ids) * self.tokens_per_block == table.num_token_slots for ids in table.block_ids)
        for group, pool in enumerate(self.pools):
            pool.check_invariants([blocks[group] for blocks in owned])
        pins: dict[Node, int] = {}
        for table in tables:
            for node in self.tree.path(table.node):
                pins[node] = pins.get(node, 0) + 1
        assert all(node.num_pins == pins.get(node, 0) for node in self.tree.nodes()), "a pin without a table"
        assert self.num_promised_blocks == sum(table.num_promised_blocks for table in tables)
