# SPDX-License-Identifier: Apache-2.0
"""The host tier's memory: refused where it cannot be, pinned bit by bit, never copied across two pieces."""

import threading
import time

import pytest
from torch import Tensor

from headrace.errors import ConfigError
from headrace.worker import host_cache
from headrace.worker.host_cache import HostCache, HostLayout, num_host_blocks

GIB = 1 << 30


def wait_until(condition: object) -> None:
    until = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.001)


def test_the_bytes_asked_for_are_shared_by_the_groups_alike() -> None:
    assert num_host_blocks(10 * GIB, [3 << 20, 1 << 20], 20 * GIB) == 2560
    assert num_host_blocks(0, [3 << 20], 0) == 0


def test_more_than_the_host_has_is_refused_in_one_sentence_that_says_what_works() -> None:
    with pytest.raises(ConfigError) as caught:
        num_host_blocks(64 * GIB, [4 << 20], 32 * GIB)
    assert caught.value.message == (
        "kv_cache_config.host_cache_size = 68719476736 (64.0 GiB) is more than this host has to give: 32.0 GiB are "
        f"free, 2 of which are left to others; use at most {30 * GIB}."
    )
    assert num_host_blocks(30 * GIB, [4 << 20], 32 * GIB) == 7680


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"= 1000 holds no block: one of this model takes 4096 bytes; use a multiple"):
        num_host_blocks(1000, [3072, 1024], 32 * GIB)


def plain(block_bytes: int, num_blocks: int) -> HostLayout:
    return HostLayout.side_by_side([block_bytes], num_blocks)


def test_unpinned_memory_is_there_at_once_and_takes_none_until_it_is_written() -> None:
    # 4 TiB could not be had.
    cache = HostCache(plain(1 << 30, 1 << 12))
    assert cache.num_ready_blocks(0) == 1 << 12
    cache.memory(0, (1 << 12) - 1)[:3] = b"abc"
    assert bytes(cache.memory(0, (1 << 12) - 1)[:4]) == b"abc\0"
    cache.close()
    assert cache.num_ready_blocks(0) == 0


LAYOUTS = {
    "side by side": HostLayout.side_by_side([5000, 1 << 13, 16], 11),
    "one group": HostLayout.side_by_side([5000], 70),
    "slabs": HostLayout.in_slabs([5000, 1 << 12, 15_000], [5120, 5120, 15_360], 15_360, 9),
    "a slab larger than a slice": HostLayout.in_slabs([5000, 9_000], [5120, 10_240], 102_400, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_do_not_overlap_and_no_run_goes_across_two_slices(
    layout: HostLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 1 << 14)
    pinned: list[Tensor] = []
    cache = HostCache(layout, pinned.append)
    wait_until(lambda: cache.num_ready_units == layout.num_units)
    groups = range(len(layout.block_bytes))
    in_slabs = not any(layout.offsets[1:]) and len(groups) > 1
    # In slabs each group has every third slab; side by side, all blocks of every group.
    mine = []
    for group in groups:
        per_slab = layout.unit_bytes // layout.strides[group]
        ids = range(cache.num_ready_blocks(group))
        mine += [(group, i) for i in ids if not in_slabs or i // per_slab % len(groups) == group]
    assert len(mine) >= layout.num_units
    for number, (group, block) in enumerate(mine):
        cache.memory(group, block)[:] = bytes([number % 251]) * layout.block_bytes[group]
    for number, (group, block) in enumerate(mine):
        assert bytes(cache.memory(group, block)) == bytes([number % 251]) * layout.block_bytes[group]
    for group in groups:
        limit = cache.blocks_per_run(group)
        assert limit == 1 or layout.strides[group] == layout.block_bytes[group]
        for start in range(0, cache.num_ready_blocks(group), limit):
            run = cache.blocks(group, start, min(limit, cache.num_ready_blocks(group) - start))
            first, end = run.data_ptr(), run.data_ptr() + run.numel()
            assert sum(p.data_ptr() <= first and end <= p.data_ptr() + p.numel() for p in pinned) == 1
        with pytest.raises(IndexError, match=f"of group {group} is none of the"):
            cache.memory(group, cache.num_ready_blocks(group))
        with pytest.raises(IndexError):
            cache.memory(group, -1)
    cache.close()


def test_neighbours_of_one_group_are_one_run() -> None:
    cache = HostCache(plain(5000, 20))
    assert cache.blocks_per_run(0) == 20
    for block in range(20):
        cache.memory(0, block)[0] = block
    assert cache.blocks(0, 3, 3)[:, 0].tolist() == [3, 4, 5]
    cache.close()


def test_pinning_goes_on_behind_and_ready_blocks_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 1 << 13)
    turns = threading.Semaphore(1)
    pinned: list[Tensor] = []

    def pin(memory: Tensor) -> None:
        turns.acquire()
        assert not memory.any()
        pinned.append(memory)

    cache = HostCache(HostLayout.side_by_side([2048, 1024], 12), pin)
    assert (cache.num_ready_blocks(0), cache.num_ready_blocks(1)) == (2, 2)
    assert cache.memory(0, 1).nbytes == 2048
    with pytest.raises(IndexError):
        cache.memory(0, 2)
    turns.release(2)
    wait_until(lambda: cache.num_ready_blocks(0) == 6)
    turns.release(3)
    wait_until(lambda: cache.num_ready_blocks(0) == 12)
    assert (cache.num_ready_blocks(0), cache.num_ready_blocks(1), len(pinned)) == (12, 12, 6)
    cache.close()


def test_memory_that_cannot_be_pinned_is_refused_at_the_start_and_done_without_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 1 << 12)
    count = 0

    def pin(memory: Tensor) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise RuntimeError("CUDA error 2: out of memory")

    cache = HostCache(plain(2048, 12), pin)
    wait_until(lambda: "stays at 50 %" in caplog.text)
    assert cache.num_ready_blocks(0) == 6
    with pytest.raises(ConfigError, match=r"did not pin the first of 24576 bytes \(CUDA error 2: out of memory\)"):
        HostCache(plain(2048, 12), pin)
    cache.close()


def test_the_end_stops_the_pinning_and_unpins_what_was_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 1 << 12)
    pinned: set[int] = set()

    def pin(memory: Tensor) -> None:
        time.sleep(0.001)
        pinned.add(memory.data_ptr())

    cache = HostCache(plain(1 << 12, 5000), pin, lambda memory: pinned.remove(memory.data_ptr()))
    wait_until(lambda: len(pinned) > 3)
    cache.close()
    assert not pinned and cache.num_ready_blocks(0) == 0
