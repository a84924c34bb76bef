# SPDX-License-Identifier: Apache-2.0
"""Blocks come back as they left, or their copy fails; and nobody waits for either."""

import logging
import random
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from transfers import NUM_BLOCKS, MemoryStore, Rig, make_arena, outside

from headrace.core.transfer import BlockCopy
from headrace.worker.block_copier import by_group, raw_blocks
from headrace.worker.kv_store import BlockKey, KvStores
from headrace.worker.launch_queue import ThreadQueue

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]
OUT = [(0, 3, 7), (1, 3, 7), (0, 4, 8), (0, 11, 0), (1, 0, 39)]
"""To the host: (group, device block, host block)."""
BACK = [(0, 0, 7), (1, 5, 7), (0, 1, 8), (0, 2, 0), (1, 6, 39)]


@pytest.mark.parametrize("gap", [0, 64], ids=["dense", "blocks apart"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_every_dtype_and_group_come_back_as_they_left(dtype: torch.dtype, gap: int) -> None:
    rig = Rig(MemoryStore(), dtype, gap)
    before = [arena.clone() for arena in rig.blocks]
    names = [outside(block, group) for group, block, _ in OUT]
    elsewhere = [(group, -1, host + 1) for group, _, host in OUT if host < 39] + [(1, -1, 20)]
    assert rig.run("to_host", OUT) == []
    assert rig.run("store", [(group, -1, host) for group, _, host in OUT], names) == []
    assert rig.run("fetch", elsewhere, names) == []
    for group, blocks in enumerate(rig.blocks):
        assert torch.equal(blocks, before[group])
    back = [(group, device, host) for (group, device, _), (_, _, host) in zip(BACK, elsewhere, strict=True)]
    assert rig.run("to_device", back) == []
    for (group, source, _), (_, target, _) in zip(OUT, BACK, strict=True):
        assert torch.equal(rig.blocks[group][target], before[group][source])
    untouched = {(0, 0), (0, 1), (0, 2), (1, 5), (1, 6)}
    for group in range(2):
        kept = [block for block in range(NUM_BLOCKS) if (group, block) not in untouched]
        assert torch.equal(rig.blocks[group][kept], before[group][kept])
    rig.transfers.close()


def test_a_flipped_bit_in_host_memory_fails_that_copy_alone() -> None:
    rig = Rig()
    assert rig.run("to_host", OUT) == []
    for index, (group, _, host) in enumerate(OUT):
        memory = rig.host.memory(group, host)
        place = random.Random(index).randrange(memory.nbytes)
        memory[place] ^= 1 << index
        assert rig.run("to_device", BACK) == [index]
        # What is wrong could be NaN, which would outlive a mask.
        assert not rig.blocks[group][BACK[index][1]].any()
        memory[place] ^= 1 << index
    assert rig.run("to_device", BACK) == []
    rig.transfers.close()


def test_a_flipped_bit_in_a_store_fails_on_the_way_to_the_device() -> None:
    """A store that checks nothing itself: what it hands out wrong is found by the checksum that travels along."""
    store = MemoryStore()
    rig = Rig(store)
    assert rig.run("to_host", OUT[:2]) == []
    names = [outside(1, 1), outside(2, 2)]
    assert rig.run("store", [(0, -1, 7), (1, -1, 7)], names) == []
    store.blocks[BlockKey(names[1], 1)][0][17] ^= 4
    assert rig.run("fetch", [(0, -1, 20), (1, -1, 21)], names) == []
    assert rig.run("to_device", [(0, 0, 20), (1, 1, 21)]) == [1]
    rig.transfers.close()


def test_a_host_block_that_never_was_filled_fails() -> None:
    rig = Rig()
    assert rig.run("to_device", [(0, 0, 5)]) == [0]
    rig.transfers.close()


def test_blocks_that_are_not_there_fail_and_write_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(MemoryStore())
    before = [arena.clone() for arena in rig.blocks]
    for copies in ([(0, 0, 40)], [(0, NUM_BLOCKS, 0)], [(0, -1, 0)], [(1, 0, -1)], [(2, 0, 0)]):
        assert rig.run("to_device", copies) == [0]
        assert rig.run("to_host", copies) == [0]
    assert "blocks 40 to 40 of group 0: the host has 40" in caplog.text
    assert "blocks 12 to 12 of group 0: the device has 12" in caplog.text
    assert rig.run("store", [(0, -1, -1), (0, -1, 0)], [bytes(32), b"1" * 32]) == [0]
    assert rig.run("fetch", [(0, -1, 40), (0, -1, 1)], [b"1" * 32, b"1" * 32]) == [0]
    assert all(torch.equal(now, then) for now, then in zip(rig.blocks, before, strict=True))
    rig.transfers.close()


def test_lookup_says_what_is_missing() -> None:
    rig = Rig(MemoryStore())
    rig.run("to_host", [(0, 0, 0), (1, 0, 0)])
    rig.run("store", [(0, -1, 0), (1, -1, 0)], [b"a" * 32, b"b" * 32])
    asked = [(0, -1, -1), (1, -1, -1), (1, -1, -1), (0, -1, -1)]
    assert rig.run("lookup", asked, [b"a" * 32, b"a" * 32, b"b" * 32, b"c" * 32]) == [1, 3]
    assert rig.run("fetch", [(0, -1, 5), (0, -1, 6)], [b"c" * 32, b"a" * 32]) == [0]
    rig.transfers.close()


def test_several_stores_are_one_and_one_that_fails_keeps_none_from_another() -> None:
    stores = [MemoryStore(), MemoryStore()]
    rig = Rig(KvStores(stores))
    rig.run("to_host", [(0, 0, 0), (0, 1, 1)])
    assert rig.run("store", [(0, -1, 0)], [b"a" * 32]) == []
    stores[0].raises = OSError("it is gone")
    assert rig.run("store", [(0, -1, 1)], [b"b" * 32]) == [0]
    stores[0].raises = None
    del stores[1].blocks[BlockKey(b"a" * 32, 0)]
    names = [b"a" * 32, b"b" * 32, b"c" * 32]
    assert rig.run("lookup", [(0, -1, -1)] * 3, names) == [2]
    assert rig.run("fetch", [(0, -1, 5), (0, -1, 6), (0, -1, 7)], names) == [2]
    assert rig.run("to_device", [(0, 7, 5), (0, 8, 6)]) == []
    assert torch.equal(rig.blocks[0][7], rig.blocks[0][0]) and torch.equal(rig.blocks[0][8], rig.blocks[0][1])
    rig.transfers.close()
    assert stores[0].is_closed and stores[1].is_closed


def test_without_a_store_nothing_is_found_outside() -> None:
    rig = Rig()
    for kind in ("lookup", "store", "fetch"):
        assert rig.run(kind, [(0, -1, 0), (1, -1, 0)], [bytes(32)] * 2) == [0, 1]
    rig.transfers.close()


def test_empty_transfers_end() -> None:
    rig = Rig(MemoryStore())
    for kind in ("to_host", "to_device", "store", "fetch", "lookup"):
        assert rig.run(kind, []) == []
    rig.transfers.close()


@pytest.mark.parametrize("kind", ["store", "fetch", "lookup"])
def test_a_store_that_raises_fails_its_transfers_and_is_heard_of_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    rig = Rig(store)
    rig.run("to_host", [(0, 0, 0)])
    rig.run("store", [(0, -1, 0)], [b"a" * 32])
    store.raises = OSError(28, "No space left on device")
    for _ in range(3):
        assert rig.run(kind, [(0, -1, 0)] * 2, [b"a" * 32] * 2) == [0, 1]
    assert caplog.text.count("No space left on device") == 1
    store.raises = None
    assert rig.run(kind, [(0, -1, 0)], [b"a" * 32]) == []
    store.raises = TimeoutError("too slow")
    assert rig.run(kind, [(0, -1, 0)], [b"a" * 32]) == [0]
    assert caplog.text.count("too slow") == 1
    rig.transfers.close()


def test_a_store_that_hangs_holds_up_neither_submit_nor_poll_nor_other_copies() -> None:
    store = MemoryStore()
    rig = Rig(store)
    rig.run("to_host", [(0, 0, 0)])
    store.gate.clear()
    for kind in ("store", "fetch", "lookup"):
        began = time.monotonic()
        for _ in range(20):
            rig.submit(kind, [(0, -1, 0)] * 3, [b"a" * 32] * 3)
        assert rig.transfers.poll() == []
        assert time.monotonic() - began < 0.5
    assert rig.run("to_device", [(0, 1, 0)]) == []
    store.gate.set()
    assert len(rig.collect(60)) == 60
    rig.transfers.close()
    assert store.is_closed


def test_loads_do_not_wait_for_saves_that_hang() -> None:
    saves_may_end = threading.Event()

    class SlowSaves(MemoryStore):
        def save(self, key: BlockKey, block: memoryview, checksum: int) -> None:
            super().save(key, block, checksum)
            saves_may_end.wait()

    store = SlowSaves()
    rig = Rig(store)
    rig.run("to_host", [(0, 0, 0)])
    rig.submit("store", [(0, -1, 0)] * 9, [b"a" * 32] * 9)
    while rig.run("lookup", [(0, -1, -1)], [b"a" * 32]):
        time.sleep(0.001)
    assert rig.run("fetch", [(0, -1, 1)], [b"a" * 32]) == []
    assert rig.transfers.poll() == []
    saves_may_end.set()
    rig.collect()
    rig.transfers.close()


def test_copies_begin_after_the_steps_that_are_launched() -> None:
    rig = Rig()
    step: Future[None] = Future()
    rig.mark = step
    rig.submit("to_host", [(0, 0, 0)])
    rig.submit("to_device", [(1, 1, 1)])
    time.sleep(0.02)
    assert rig.transfers.poll() == []
    rig.blocks[0][0] = 7
    step.set_result(None)
    rig.collect(2)
    assert bytes(rig.host.memory(0, 0)) == bytes([7]) * rig.host.memory(0, 0).nbytes
    rig.transfers.close()


def test_many_transfers_at_once_each_end_once_with_the_right_bytes() -> None:
    rng = random.Random(4)
    store = MemoryStore()
    rig = Rig(store, num_host_blocks=200)
    before = [arena.clone() for arena in rig.blocks]
    # Blocks 6 to 11 go out, 0 to 5 are written; each host block serves one chain of transfers at a time.
    stages: dict[int, tuple[int, int, int, int]] = {}
    for host in range(200):
        group, source = rng.randrange(2), rng.randrange(6, 12)
        stages[rig.submit("to_host", [(group, source, host)])] = (0, group, source, host)
    num_checked = 0
    while stages:
        for result in rig.transfers.poll():
            stage, group, source, host = stages.pop(result.transfer_id)
            assert result.failed == []
            name = outside(source, group)
            if stage == 0:
                stages[rig.submit("store", [(group, -1, host)], [name])] = (1, group, source, host)
            elif stage == 1:
                stages[rig.submit("fetch", [(group, -1, host)], [name])] = (2, group, source, host)
            elif stage == 2 and not any(other[0] == 3 and other[1] == group for other in stages.values()):
                stages[rig.submit("to_device", [(group, 0, host)])] = (3, group, source, host)
            if stage == 3:
                assert torch.equal(rig.blocks[group][0], before[group][source])
                num_checked += 1
    assert num_checked > 1 and len(store.blocks) <= 12
    rig.transfers.close()


def test_the_end_drops_what_has_not_begun() -> None:
    store = MemoryStore()
    rig = Rig(store)
    rig.run("to_host", [(0, 0, 0)])
    step: Future[None] = Future()
    rig.mark = step
    for _ in range(50):
        rig.submit("to_host", [(0, 0, 1)])
        rig.submit("fetch", [(0, -1, 2)], [bytes(32)])
        rig.submit("store", [(0, -1, 0)], [bytes(32)])
    threading.Timer(0.05, lambda: step.set_result(None)).start()
    began = time.monotonic()
    rig.transfers.close()
    rig.transfers.close()
    assert time.monotonic() - began < 3
    assert store.is_closed and rig.host.num_ready_blocks(0) == 0


def test_a_call_that_never_returns_is_left_behind_with_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.worker.kv_transfer.CLOSE_S", 0.1)
    store = MemoryStore()
    rig = Rig(store)
    rig.run("to_host", [(0, 0, 0)])
    rig.run("store", [(0, -1, 0)], [b"a" * 32])
    store.gate.clear()
    rig.submit("fetch", [(0, -1, 3)], [b"a" * 32])
    while store.num_calls < 2:
        time.sleep(0.001)
    with caplog.at_level(logging.WARNING):
        rig.transfers.close()
    assert "has not returned" in caplog.text
    memory = rig.host.memory(0, 3)
    store.gate.set()
    until = time.monotonic() + 10
    while bytes(memory) != bytes(rig.blocks[0][0].numpy()):
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_device_thread_that_works_on_is_waited_for_by_copies_alone() -> None:
    gate = threading.Event()
    device = ThreadQueue(1)
    device.submit(gate.wait)
    rig = Rig()
    rig.mark = device.submit(lambda: None)
    rig.submit("to_host", [(0, 0, 0)])
    assert rig.transfers.poll() == []
    gate.set()
    rig.collect()
    rig.transfers.close()
    device.close()


def test_neighbours_are_one_copy_unless_a_slice_ends() -> None:
    rig = Rig()
    copies = [BlockCopy(0, 5, 3), BlockCopy(0, 3, 1), BlockCopy(0, 4, 2), BlockCopy(1, 6, 4), BlockCopy(0, 6, 4)]

    def runs(copies: list[BlockCopy], limit: int) -> list[list[tuple[int, int, int]]]:
        return [each.runs(limit) for each in by_group(copies, rig.arenas, rig.host)]

    assert runs(copies, 100) == [[(3, 1, 4)], [(6, 4, 1)]]
    assert runs(copies, 4) == [[(3, 1, 3), (6, 4, 1)], [(6, 4, 1)]]
    assert runs(copies[:2], 1) == [[(3, 1, 1), (5, 3, 1)]]
    assert runs([BlockCopy(0, 9, 1), BlockCopy(0, 8, 2)], 100) == [[(9, 1, 1), (8, 2, 1)]]
    assert runs([BlockCopy(0, 1, 5), BlockCopy(0, 2, 7)], 100) == [[(1, 5, 1), (2, 7, 1)]]
    assert runs([], 100) == []
    assert [each.indices.tolist() for each in by_group(copies, rig.arenas, rig.host)] == [[1, 2, 0, 4], [3]]
    rig.transfers.close()


def test_raw_blocks_are_the_arena_itself() -> None:
    for gap in (0, 48):
        arena = make_arena((2, 2, 1, 8, 8), torch.bfloat16, gap=gap)
        raw = raw_blocks(arena)
        assert raw.shape == (NUM_BLOCKS, arena[0].numel() * 2)
        raw[3] = 0
        assert not arena[3].any() and arena[2].any()
