# SPDX-License-Identifier: Apache-2.0
"""Block tables hold what they must, blocks are counted truly, and the pool never gives a block twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block_pool import BlockPool
from headrace.core.kv_cache_manager import BlockTable, KVCacheManager


def open_table(cache: KVCacheManager, tokens: list[int], promised: int = 0, spare: int = 0) -> BlockTable:
    table = cache.open(tokens, (), promised or len(tokens), spare=spare, use_cache=True)
    assert table is not None
    return table


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.integers(-8, 8), max_size=40))
def test_a_block_is_out_or_free_and_never_both(moves: list[int]) -> None:
    pool = BlockPool(16)
    out: list[int] = []
    for move in moves:
        if move > 0:
            out += pool.take(min(move, pool.num_free))
        else:
            given, out = out[:-move], out[-move:]
            pool.give_back(given)
        pool.check_invariants(out)
        assert len(out) == len(set(out)) == 16 - pool.num_free


def test_freeing_twice_and_taking_too_many_is_caught() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    with pytest.raises(AssertionError, match="asked for 2 of 1"):
        pool.take(2)
    pool.give_back([block_id])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back([block_id])


def test_opening_takes_nothing_and_extending_takes_what_is_missing() -> None:
    cache = KVCacheManager(8, 4)
    table = open_table(cache, list(range(10)))
    assert cache.num_free_blocks == 8 and cache.num_promised_blocks == 3
    (added,) = cache.extend(table, 5)
    assert len(added) == 2 and table.num_token_slots == 8 and cache.num_promised_blocks == 1
    assert cache.extend(table, 8) == ([],)
    cache.close(table, list(range(10)), 5)
    assert cache.num_promised_blocks == 0 and cache.num_cached_blocks == 1
    cache.check_invariants([])


def test_a_promise_is_not_made_twice() -> None:
    cache = KVCacheManager(8, 4)
    first = open_table(cache, list(range(20)))
    assert cache.open([1] * 16, (), 16, spare=0, use_cache=True) is None
    assert cache.open([1] * 12, (), 12, spare=1, use_cache=True) is None
    second = open_table(cache, [1] * 12)
    cache.check_invariants([first, second])


def test_a_refusal_changes_nothing() -> None:
    cache = KVCacheManager(4, 2)
    tokens = list(range(8))
    table = open_table(cache, tokens)
    cache.extend(table, 8)
    cache.close(table, tokens, 8)
    assert cache.open(tokens, (), 99, spare=0, use_cache=True) is None
    assert cache.num_cached_blocks == 4 and cache.num_promised_blocks == 0
    cache.check_invariants([])


def test_the_cache_is_used_up_before_anything_is_refused() -> None:
    cache = KVCacheManager(4, 2)
    for start in (0, 100):
        tokens = list(range(start, start + 8))
        table = open_table(cache, tokens)
        cache.extend(table, 8)
        cache.close(table, tokens, 8)
    assert cache.num_free_blocks == 0 and cache.num_available_blocks == 4


def test_blocks_of_a_running_table_are_found_by_others_as_soon_as_they_are_computed() -> None:
    cache = KVCacheManager(8, 2)
    tokens = list(range(8))
    first = open_table(cache, tokens)
    cache.extend(first, 8)
    cache.commit(first, tokens, 5)
    second = open_table(cache, tokens)
    assert second.num_cached_tokens == 4
    assert second.block_ids[0] == first.block_ids[0][:2]
    cache.check_invariants([first, second])


def test_of_equal_blocks_in_use_only_the_first_is_shared_and_only_one_stays() -> None:
    cache = KVCacheManager(8, 2)
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
    cache = KVCacheManager(4, 2)
    tokens = [1, 2]
    for _ in range(2):
        table = open_table(cache, tokens)
        cache.extend(table, 2)
        cache.commit(table, tokens, 2)
        assert cache.num_available_blocks == 3
        cache.close(table, tokens, 2)
    assert cache.num_cached_blocks == 1 and cache.num_free_blocks == 3


def test_untrusted_blocks_and_the_way_to_them_leave_the_cache() -> None:
    cache = KVCacheManager(8, 2)
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
