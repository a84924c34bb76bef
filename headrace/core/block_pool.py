# SPDX-License-Identifier: Apache-2.0
"""Which blocks there are and what state each is in: the arena's slabs, shared out among the KV groups.

A block is an int, its index in its group's view of the arena; block `i` lies in slab `i // blocks_per_slab`. It is
free, used (some sequence needs it) or cached (kept for reuse, needed by nobody). Groups take whole slabs and cut
their blocks from them; a slab whose blocks are all free goes back to all groups.
"""

from collections.abc import Iterable, Sequence

from headrace.core.kv_cache_spec import CacheLayout
from headrace.utils.math import cdiv

FREE, USED, CACHED = 0, 1, 2


class GroupPool:
    """The blocks of one group. Only `BlockPool` changes it."""

    __slots__ = (
        "free_in_slab",
        "num_cached",
        "num_free",
        "num_used",
        "open_mixed",
        "open_unused",
        "per_slab",
        "state",
        "unused_slabs",
        "used_in_slab",
    )

    def __init__(self, per_slab: int, num_slabs: int) -> None:
        self.per_slab = per_slab
        self.state = bytearray(per_slab * num_slabs)
        self.num_free = 0
        """Free blocks in slabs that the group has."""
        self.num_used = 0
        self.num_cached = 0
        self.free_in_slab: dict[int, list[int]] = {}
        """Of each slab the group has, its free blocks."""
        self.used_in_slab: dict[int, int] = {}
        """Of each, how many of its blocks are used."""
        self.unused_slabs: dict[int, int] = {}
        """Those without a used block, longest so first: all that is in them could be given up. Each with the time
        since when."""
        self.open_mixed: dict[int, None] = {}
        """Slabs with free and with used blocks."""
        self.open_unused: dict[int, None] = {}
        """Slabs with free blocks and no used one."""

    @property
    def num_to_spare(self) -> int:
        """Blocks free or cached in slabs with used blocks: no other group can have them."""
        return self.num_free + self.num_cached - len(self.unused_slabs) * self.per_slab


class BlockPool:
    """Blocks of every group, in one of three states each. It decides nothing: who gives up what is the cache's."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.clock = 0
        """Counts moments of use; who owns the order of use moves it."""
        self.free_slabs = list(range(layout.num_slabs - 1, -1, -1))
        self.groups = [GroupPool(group.blocks_per_slab, layout.num_slabs) for group in layout.groups]
        if len(self.groups) == 1:
            while self.free_slabs:
                self.add_slab(0)

    def can_have(self, counts: Sequence[int], num_slabs_lent: int = 0) -> bool:
        """Whether `counts[g]` more blocks of each group g could be used at once, by giving up cached ones if need be.

        num_slabs_lent: slabs to leave out of the reckoning.
        """
        room = len(self.free_slabs) - num_slabs_lent
        for group, count in zip(self.groups, counts, strict=True):
            lacking = count - group.num_to_spare
            room += len(group.unused_slabs) - (cdiv(lacking, group.per_slab) if lacking > 0 else 0)
        return room >= 0

    # The life of a block

    def take(self, index: int, count: int) -> list[int]:
        """`count` blocks of group `index`, from now on used. The caller has seen to it that so many are free.

        They come from slabs with used blocks first, so that the others can go back.
        """
        group = self.groups[index]
        assert count <= group.num_free, f"asked for {count} of {group.num_free} free blocks"
        taken: list[int] = []
        while len(taken) < count:
            slab = next(reversed(group.open_mixed or group.open_unused))
            free = group.free_in_slab[slab]
            some = free[len(taken) - count :][::-1]
            del free[-len(some) :]
            for block_id in some:
                group.state[block_id] = USED
            group.num_free -= len(some)
            group.num_used += len(some)
            if not free:
                group.open_mixed.pop(slab, None)
                group.open_unused.pop(slab, None)
            self._count_used(group, slab, len(some))
            taken += some
        return taken

    def add_slab(self, index: int) -> None:
        """Give group `index` a free slab."""
        slab = self.free_slabs.pop()
        group = self.groups[index]
        start = slab * group.per_slab
        group.free_in_slab[slab] = list(range(start + group.per_slab - 1, start - 1, -1))
        group.used_in_slab[slab] = 0
        group.unused_slabs[slab] = self.clock
        group.open_unused[slab] = None
        group.num_free += group.per_slab

    def free(self, index: int, block_ids: Iterable[int]) -> None:
        """Used or cached blocks hold nothing from now on."""
        group = self.groups[index]
        state, per_slab = group.state, group.per_slab
        for block_id in block_ids:
            before = state[block_id]
            assert before != FREE, f"block {block_id} is freed twice"
            state[block_id] = FREE
            slab = block_id // per_slab
            free = group.free_in_slab[slab]
            if not free:
                (group.open_mixed if group.used_in_slab[slab] else group.open_unused)[slab] = None
            free.append(block_id)
            group.num_free += 1
            if before == USED:
                group.num_used -= 1
                self._count_used(group, slab, -1)
            else:
                group.num_cached -= 1
            if len(free) == per_slab and len(self.groups) > 1:
                self._give_back(group, slab)

    def cache(self, index: int, block_id: int) -> None:
        """A used block is needed by nobody from now on, but kept."""
        group = self.groups[index]
        assert group.state[block_id] == USED, f"block {block_id} is not used"
        group.state[block_id] = CACHED
        group.num_used -= 1
        group.num_cached += 1
        self._count_used(group, block_id // group.per_slab, -1)

    def use(self, index: int, block_id: int) -> None:
        """A cached block is needed again."""
        group = self.groups[index]
        assert group.state[block_id] == CACHED, f"block {block_id} is not cached"
        group.state[block_id] = USED
        group.num_cached -= 1
        group.num_used += 1
        self._count_used(group, block_id // group.per_slab, 1)

    # Inside

    def _count_used(self, group: GroupPool, slab: int, change: int) -> None:
        before = group.used_in_slab[slab]
        group.used_in_slab[slab] = before + change
        if before == 0:
            del group.unused_slabs[slab]
            if group.open_unused.pop(slab, 0) is None:
                group.open_mixed[slab] = None
        elif before + change == 0:
            group.unused_slabs[slab] = self.clock
            if group.open_mixed.pop(slab, 0) is None:
                group.open_unused[slab] = None

    def _give_back(self, group: GroupPool, slab: int) -> None:
        """A slab of free blocks only goes back to all."""
        del group.free_in_slab[slab], group.used_in_slab[slab], group.unused_slabs[slab], group.open_unused[slab]
        group.num_free -= group.per_slab
        self.free_slabs.append(slab)

    # Checking

    def check_invariants(self, used: Sequence[Sequence[int]], cached: Sequence[Sequence[int]]) -> None:
        """Every block is free, in `used` or in `cached` (lists per group), exactly once."""
        slabs = list(self.free_slabs)
        for group, used_ids, cached_ids in zip(self.groups, used, cached, strict=True):
            free_ids = [block_id for free in group.free_in_slab.values() for block_id in free]
            own = group.free_in_slab.keys()
            every = [slab * group.per_slab + place for slab in own for place in range(group.per_slab)]
            assert sorted([*free_ids, *used_ids, *cached_ids]) == sorted(every), "a block is lost or owned twice"
            for state, some in ((FREE, free_ids), (USED, used_ids), (CACHED, cached_ids)):
                assert all(group.state[block_id] == state for block_id in some), f"a block is not in state {state}"
            assert (group.num_free, group.num_used, group.num_cached) == (len(free_ids), len(used_ids), len(cached_ids))
            for slab in own:
                num_used = sum(block_id // group.per_slab == slab for block_id in used_ids)
                assert group.used_in_slab[slab] == num_used
                assert (slab in group.unused_slabs) == (num_used == 0)
                has_free = bool(group.free_in_slab[slab])
                assert (slab in group.open_mixed) == (has_free and num_used > 0)
                assert (slab in group.open_unused) == (has_free and num_used == 0)
                assert len(self.groups) == 1 or len(group.free_in_slab[slab]) < group.per_slab, "a slab is hoarded"
            slabs += own
        assert sorted(slabs) == list(range(self.layout.num_slabs)), "a slab is lost or owned twice"
