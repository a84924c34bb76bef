# SPDX-License-Identifier: Apache-2.0
"""The free blocks of one KV group. A block is an int, the index of its slab of the arena."""


class BlockPool:
    """Hands out block ids and takes them back; a block is out or free, never both."""

    __slots__ = ("_free", "_is_free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks, the last freed first. The caller has checked `num_free`."""
        if count == 0:
            return []
        assert count <= len(self._free), f"asked for {count} of {len(self._free)} free blocks"
        block_ids = self._free[-count:][::-1]
        del self._free[-count:]
        for block_id in block_ids:
            self._is_free[block_id] = 0
        return block_ids

    def give_back(self, block_ids: list[int]) -> None:
        """Free blocks that `take` handed out."""
        for block_id in block_ids:
            assert not self._is_free[block_id], f"block {block_id} is freed twice"
            self._is_free[block_id] = 1
        self._free += block_ids

    def check_invariants(self, used: list[int]) -> None:
        """Every block is free or in `used`, exactly once."""
        assert sorted(self._free + used) == list(range(self.num_blocks)), "a block is lost or owned twice"
        assert sum(self._is_free) == len(self._free)
        assert all(self._is_free[block_id] for block_id in self._free)
