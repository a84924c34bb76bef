# SPDX-License-Identifier: Apache-2.0
"""The host tier's memory: refused where it cannot be, pinned bit by bit, never copied across two pieces."""

import logging
import threading
import time

import pytest
from torch import Tensor

from headrace.errors import ConfigError
from headrace.worker import host_cache
from headrace.worker.host_cache import HostCache, num_host_blocks

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


def test_unpinned_memory_is_there_at_once_and_takes_none_until_it_is_written() -> None:
    # 4 TiB could not be had.
    cache = HostCache([1 << 30], 1 << 12)
    assert cache.num_ready_blocks(0) == 1 << 12
    cache.memory(0, (1 << 12) - 1)[:3] = b"abc"
    assert bytes(cache.memory(0, (1 << 12) - 1)[:4]) == b"abc\0"
    cache.close()
    assert cache.num_ready_blocks(0) == 0


def test_no_run_goes_across_two_slices_and_blocks_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 1 << 14)
    cache = HostCache([5000, 1 << 15], 11)
    assert (cache.blocks_per_run(0), cache.blocks_per_run(1)) == (3, 1)
    for group, size in ((0, 5000), (1, 1 << 15)):
        for block in range(11):
            cache.memory(group, block)[:] = bytes([block + 1]) * size
        assert [cache.memory(group, block)[-1] for block in range(11)] == list(range(1, 12))
    assert cache.blocks(0, 3, 3).shape == (3, 5000)
    assert cache.blocks(0, 3, 3)[:, 0].tolist() == [4, 5, 6]
    with pytest.raises(IndexError, match="block 11 of group 0 is none of the 11"):
        cache.memory(0, 11)
    cache.close()


def test_pinning_goes_on_behind_and_ready_blocks_grow_alike_in_all_groups(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 1 << 12)
    turns = threading.Semaphore(2)
    pinned: list[Tensor] = []

    def pin(memory: Tensor) -> None:
        turns.acquire()
        assert not memory.any()
        pinned.append(memory)

    with caplog.at_level(logging.INFO):
        cache = HostCache([2048, 1024], 12, pin)
        assert (cache.num_ready_blocks(0), cache.num_ready_blocks(1)) == (2, 4)
        assert cache.memory(0, 1).nbytes == 2048
        with pytest.raises(IndexError):
            cache.memory(0, 2)
        turns.release(3)
        wait_until(lambda: len(pinned) == 5)
        wait_until(lambda: cache.num_ready_blocks(0) == 6)
        assert cache.num_ready_blocks(1) == 8
        turns.release(4)
        wait_until(lambda: "pinned in" in caplog.text)
    assert (cache.num_ready_blocks(0), cache.num_ready_blocks(1)) == (12, 12)
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

    cache = HostCache([2048], 12, pin)
    wait_until(lambda: "stays at 6 of 12 blocks" in caplog.text)
    assert cache.num_ready_blocks(0) == 6
    with pytest.raises(ConfigError, match=r"did not pin the first of 24576 bytes \(CUDA error 2: out of memory\)"):
        HostCache([2048], 12, pin)
    cache.close()


def test_the_end_stops_the_pinning_and_unpins_what_was_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 1 << 12)
    pinned: set[int] = set()

    def pin(memory: Tensor) -> None:
        time.sleep(0.001)
        pinned.add(memory.data_ptr())

    cache = HostCache([1 << 12], 5000, pin, lambda memory: pinned.remove(memory.data_ptr()))
    wait_until(lambda: len(pinned) > 3)
    cache.close()
    assert not pinned and cache.num_ready_blocks(0) == 0
