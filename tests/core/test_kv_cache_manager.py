# SPDX-License-Identifier: Apache-2.0
"""Block tables hold what they must, blocks are counted truly, and the pool never gives a block twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block_pool import BlockPool
from headrace.core.kv_cache_manager import BlockTable, KVCacheManager
from headrace.core.kv_cache_spec import CacheLayout, GroupLayout


def open_table(cache: KVCacheManager, tokens: list[int], promised: int = 0, spare: float = 0.0) -> BlockTable:
    table = cache.open(tokens, (), promised or len(tokens), spare=spare, use_cache=True)
    assert table is not None
    return table


LAYOUTS = [
    CacheLayout.plain(16),
    CacheLayout(6, (GroupLayout(4, None, 4), GroupLayout(1, 8, 16), GroupLayout(2, None, 8))),
]


@settings(max_examples=200, deadline=None, database=None)
@given(st.sampled_from(LAYOUTS), st.lists(st.tuples(st.integers(0, 2), st.integers(-8, 8)), max_size=60))
def test_a_block_is_used_cached_or_free_and_slabs_go_round(layout: CacheLayout, moves: list[tuple[int, int]]) -> None:
    pool = BlockPool(layout)
    used: list[list[int]] = [[] for _ in layout.groups]
    cached: list[list[int]] = [[] for _ in layout.groups]
    for number, move in moves:
        index = number % len(layout.groups)
        if move > 4 and used[index]:
            cached[index].append(used[index].pop(0))
            pool.cache(index, cached[index][-1])
        elif move > 0:
            for _ in range(move):
                if not pool.groups[index].num_free and pool.free_slabs:
                    pool.add_slab(index)
                if pool.groups[index].num_free:
                    used[index] += pool.take(index, 1)
        elif move < -4 and cached[index]:
            used[index].append(cached[index].pop(0))
            pool.use(index, used[index][-1])
        else:
            for some in (used, cached):
                pool.free(index, some[index][:-move])
                del some[index][:-move]
        pool.check_invariants(used, cached)


def test_freeing_twice_and_taking_too_many_is_caught() -> None:
    pool = BlockPool(CacheLayout.plain(2))
    (block_id,) = pool.take(0, 1)
    with pytest.raises(AssertionError, match="asked for 2 of 1"):
        pool.take(0, 2)
    pool.free(0, [block_id])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(0, [block_id])


def test_what_can_be_had_counts_slabs_that_others_would_give_up() -> None:
    pool = BlockPool(CacheLayout(3, (GroupLayout(4, None, 4), GroupLayout(2, None, 8))))
    assert pool.can_have([12, 0]) and pool.can_have([8, 2]) and not pool.can_have([9, 2])
    pool.add_slab(0)
    first = pool.take(0, 1)
    # The slab of a block in use is its group's; the other three blocks there are free for that group alone.
    assert pool.can_have([3, 4]) and not pool.can_have([4, 4])
    pool.cache(0, first[0])
    assert pool.can_have([0, 6])


def test_opening_takes_nothing_and_extending_takes_what_is_missing() -> None:
    cache = KVCacheManager(CacheLayout.plain(8), 4)
    table = open_table(cache, list(range(10)))
    assert cache.num_free_blocks == 8 and cache.num_promised_blocks == 3
    (added,) = cache.extend(table, 5)
    assert len(added) == 2 and table.num_token_slots == 8 and cache.num_promised_blocks == 1
    assert cache.extend(table, 8) == ([],)
    cache.close(table, list(range(10)), 5)
    assert cache.num_promised_blocks == 0 and cache.num_cached_blocks == 1
    cache.check_invariants([])


def test_a_promise_is_not_made_twice() -> None:
    cache = KVCacheManager(CacheLayout.plain(8), 4)
    first = open_table(cache, list(range(20)))
    assert cache.open([1] * 16, (), 16, spare=0.0, use_cache=True) is None
    assert cache.open([1] * 12, (), 12, spare=1 / 8, use_cache=True) is None
    second = open_table(cache, [1] * 12)
    cache.check_invariants([first, second])


def test_a_refusal_changes_nothing() -> None:
    cache = KVCacheManager(CacheLayout.plain(4), 2)
    tokens = list(range(8))
    table = open_table(cache, tokens)
    cache.extend(table, 8)
    cache.close(table, tokens, 8)
    assert cache.open(tokens, (), 99, spare=0.0, use_cache=True) is None
    assert cache.num_cached_blocks == 4 and cache.num_promised_blocks == 0
    cache.check_invariants([])


def test_the_cache_is_used_up_before_anything_is_refused() -> None:
    cache = KVCacheManager(CacheLayout.plain(4), 2)
    for start in (0, 100):
        tokens = list(range(start, start + 8))
        table = open_table(cache, tokens)
        cache.extend(table, 8)
        cache.close(table, tokens, 8)
    assert cache.num_free_blocks == 0 and cache.num_cached_blocks == 4
    assert cache.reserve(4) and not cache.reserve(5)


def test_blocks_of_a_running_table_are_found_by_others_as_soon_as_they_are_computed() -> None:
    cache = KVCacheManager(CacheLayout.plain(8), 2)
    tokens = list(range(8))
    first = open_table(cache, tokens)
    cache.extend(first, 8)
    cache.commit(first, tokens, 5)
    second = open_table(cache, tokens)
    assert second.num_cached_tokens == 4
    assert second.block_ids[0] == first.block_ids[0][:2]
    cache.check_invariants([first, second])


def test_of_equal_blocks_in_use_only_the_first_is_shared_and_only_one_stays() -> None:
    cache = KVCacheManager(CacheLayout.plain(8), 2)
    tokens = list(range(4))
    first, second = open_table(cache, tokens), open_table(cache, tokens)
    for table in (first, second):
        cache.extend(table, 4)
        cache.commit(table, tokens, 4)
    assert (first.node.depth, second.node.depth) == (2, 0)
    cache.check_invariants([first, second])
    cache.close(second, tokens, 4)
    assert cache.num_free_blocks == 6
    cache.check_invariants([first])
    cache.close(first, tokens, 4)
    assert cache.num_cached_blocks == 2


def test_a_cached_block_that_nobody_uses_makes_way_for_an_equal_one() -> None:
    cache = KVCacheManager(CacheLayout.plain(4), 2, enable_partial_reuse=False)
    tokens = [1, 2]
    for _ in range(2):
        table = open_table(cache, tokens)
        cache.extend(table, 2)
        cache.commit(table, tokens, 2)
        assert cache.reserve(3) and not cache.reserve(4)
        cache.close(table, tokens, 2)
    assert cache.num_cached_blocks == 1 and cache.num_free_blocks == 3


def test_untrusted_blocks_and_the_way_to_them_leave_the_cache() -> None:
    cache = KVCacheManager(CacheLayout.plain(8), 2)
    tokens = list(range(6))
    first = open_table(cache, tokens)
    cache.extend(first, 6)
    cache.commit(first, tokens, 6)
    second = open_table(cache, tokens)
    cache.close_untrusted(first)
    cache.check_invariants([second])
    assert open_table(cache, tokens).num_cached_tokens == 0
    cache.extend(second, 6)
    cache.commit(second, tokens, 6)
    cache.close(second, tokens, 6)
    assert cache.num_cached_blocks == 0 and cache.num_free_blocks == 8


# Windows, parts of blocks, retention

WINDOWED = CacheLayout(16, (GroupLayout(1, None, 4), GroupLayout(4, 4, 1)))


def run_through(cache: KVCacheManager, table: BlockTable, tokens: list[int], count: int) -> None:
    """Compute `count` tokens of a sequence and commit them."""
    cache.extend(table, count)
    cache.commit(table, tokens, count)


def test_a_windowed_group_keeps_what_the_next_token_sees() -> None:
    cache = KVCacheManager(WINDOWED, 2, max_tokens_in_flight=2)
    tokens = list(range(20))
    table = open_table(cache, tokens)
    for count in range(2, 22, 2):
        run_through(cache, table, tokens, count)
    assert table.first == [0, 8]
    assert [group.num_used for group in cache.pool.groups] == [10, 2]
    assert cache.pool.groups[1].num_cached == 8
    cache.check_invariants([table])


def test_without_reuse_what_leaves_the_window_is_free_at_once() -> None:
    cache = KVCacheManager(WINDOWED, 2, enable_block_reuse=False, max_tokens_in_flight=2)
    table = open_table(cache, list(range(20)))
    for count in range(2, 22, 2):
        run_through(cache, table, list(range(20)), count)
    assert (cache.pool.groups[1].num_used, cache.pool.groups[1].num_cached) == (2, 0)
    cache.check_invariants([table])


def test_a_match_ends_where_every_window_is_whole() -> None:
    cache = KVCacheManager(WINDOWED, 2, enable_partial_reuse=False, max_tokens_in_flight=20)
    tokens = list(range(20))
    table = open_table(cache, tokens)
    run_through(cache, table, tokens, 20)
    cache.close(table, tokens, 20)
    assert open_and_close(cache, [*tokens, 1]) == 20
    # Blocks 0 to 5 of the windowed group go: a sequence that parts from this one there finds nothing to see.
    for _ in range(6):
        cache.tree.give_up_one(1)
    assert open_and_close(cache, [*tokens, 1]) == 20
    assert open_and_close(cache, [*tokens[:16], 99]) == 16
    assert open_and_close(cache, [*tokens[:14], 99]) == 0
    cache.check_invariants([])


def open_and_close(cache: KVCacheManager, tokens: list[int]) -> int:
    table = open_table(cache, tokens)
    num_cached = table.num_cached_tokens
    cache.close(table, tokens, 0)
    return num_cached


def test_a_block_that_begins_alike_is_copied_and_stays() -> None:
    cache = KVCacheManager(CacheLayout.plain(8), 4)
    tokens = list(range(8))
    first = open_table(cache, tokens)
    run_through(cache, first, tokens, 8)
    second = open_table(cache, [*tokens[:7], 99, 98])
    assert second.num_cached_tokens == 7
    cache.extend(second, 9)
    assert cache.copies(second) == [(0, first.block_ids[0][1], second.block_ids[0][1])]
    cache.end_copies(second)
    assert second.block_ids[0][0] == first.block_ids[0][0]
    cache.check_invariants([first, second])


def test_without_copies_a_block_that_begins_alike_is_taken_over_if_nobody_needs_it() -> None:
    cache = KVCacheManager(CacheLayout.plain(8), 4, copy_on_partial_reuse=False)
    tokens = list(range(8))
    first = open_table(cache, tokens)
    run_through(cache, first, tokens, 8)
    assert open_and_close(cache, [*tokens[:7], 99]) == 4
    block_id = first.block_ids[0][1]
    cache.close(first, tokens, 8)
    second = open_table(cache, [*tokens[:7], 99])
    assert second.num_cached_tokens == 7 and second.block_ids[0][1] == block_id
    assert cache.copies(second) == []
    cache.check_invariants([second])
    cache.close(second, [*tokens[:7], 99], 8)
    assert open_and_close(cache, [*tokens, 1]) == 7


def test_partial_reuse_can_be_switched_off_and_needs_an_eighth_of_a_block() -> None:
    tokens = list(range(32))
    for enabled, beginning, found in ((False, 31, 0), (True, 3, 0), (True, 4, 4)):
        cache = KVCacheManager(CacheLayout.plain(8), 32, enable_partial_reuse=enabled)
        table = open_table(cache, tokens)
        run_through(cache, table, tokens, 32)
        cache.close(table, tokens, 32)
        assert open_and_close(cache, [*tokens[:beginning], 99, 98]) == found


def test_two_salts_never_share_a_block_nor_a_part_of_one() -> None:
    cache = KVCacheManager(CacheLayout.plain(8), 4)
    tokens = list(range(8))
    table = cache.open(tokens, ("a",), 8, spare=0.0, use_cache=True)
    assert table is not None
    run_through(cache, table, tokens, 8)
    other = cache.open(tokens, ("b",), 8, spare=0.0, use_cache=True)
    assert other is not None and other.num_cached_tokens == 0
    cache.check_invariants([table, other])
