# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of transfers: streams, pinned memory, copies beside steps and beside a capture."""

import os
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from transfers import NUM_BLOCKS, SHAPES, MemoryStore, make_arena, outside

from headrace.core.transfer import BlockCopy, Transfer, TransferResult
from headrace.kernels.block_checksum import block_checksums, checksum_of
from headrace.worker import host_cache
from headrace.worker.block_copier import CudaCopier, raw_blocks
from headrace.worker.host_cache import HostCache, HostLayout, pin_for_cuda, unpin_for_cuda
from headrace.worker.kv_transfer import KvTransfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU"),
]
BF16 = torch.bfloat16
OUT = [(0, 3, 7), (1, 3, 7), (0, 4, 8), (0, 11, 0), (1, 0, 39)]
BACK = [(0, 0, 7), (1, 5, 7), (0, 1, 8), (0, 2, 0), (1, 6, 39)]
BUSY_CYCLES = 2_000_000_000
"""About a second of a GPU's time."""


class Rig:
    """Transfers over arenas on the GPU."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]] = SHAPES,
        dtype: torch.dtype = BF16,
        gap: int = 0,
        num_host_blocks: int = 40,
        store: MemoryStore | None = None,
    ) -> None:
        self.arenas = [make_arena(shape, dtype, "cuda", gap) for shape in shapes]
        self.blocks = [raw_blocks(arena) for arena in self.arenas]
        layout = HostLayout.side_by_side([blocks.shape[1] for blocks in self.blocks], num_host_blocks)
        self.host = HostCache(layout, pin_for_cuda, unpin_for_cuda)
        self.transfers = KvTransfers(CudaCopier(self.arenas, self.host), self.host, store)
        until = time.monotonic() + 60
        while self.host.num_ready_units < num_host_blocks:
            assert time.monotonic() < until
            time.sleep(0.001)
        torch.cuda.synchronize()

    def submit(self, kind: str, copies: Sequence[tuple[int, int, int]], hashes: Sequence[bytes] = ()) -> None:
        self.transfers.submit(Transfer(1, kind, [BlockCopy(*each) for each in copies], list(hashes)))

    def collect(self, count: int = 1) -> list[TransferResult]:
        results: list[TransferResult] = []
        until = time.monotonic() + 60
        while len(results) < count:
            assert time.monotonic() < until
            time.sleep(0.0005)
            results += self.transfers.poll()
        return results

    def run(self, kind: str, copies: Sequence[tuple[int, int, int]], hashes: Sequence[bytes] = ()) -> list[int]:
        self.submit(kind, copies, hashes)
        return self.collect()[0].failed


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(store=MemoryStore())
    yield made
    made.transfers.close()


@pytest.mark.parametrize("gap", [0, 512], ids=["dense", "blocks apart"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_blocks_come_back_as_they_left(dtype: torch.dtype, gap: int) -> None:
    rig = Rig(dtype=dtype, gap=gap)
    before = [blocks.clone() for blocks in rig.blocks]
    assert rig.run("to_host", OUT) == []
    for group, device, host in OUT:
        assert bytes(rig.host.memory(group, host)) == bytes(before[group][device].cpu().numpy())
        assert rig.host.checksums[group][host] == checksum_of(rig.host.memory(group, host))
    assert rig.run("to_device", BACK) == []
    for (group, source, _), (_, target, _) in zip(OUT, BACK, strict=True):
        assert torch.equal(rig.blocks[group][target], before[group][source])
    for group, written in ((0, [0, 1, 2]), (1, [5, 6])):
        kept = [block for block in range(NUM_BLOCKS) if block not in written]
        assert torch.equal(rig.blocks[group][kept], before[group][kept])
    rig.transfers.close()


def test_runs_of_neighbours_and_slices_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 5 * 4096)
    rig = Rig([(1, 2, 2, 8, 64)], num_host_blocks=12)
    assert rig.host.blocks_per_run(0) == 5
    before = rig.blocks[0].clone()
    assert rig.run("to_host", [(0, block, block) for block in range(12)]) == []
    rig.blocks[0].zero_()
    assert rig.run("to_device", [(0, 11 - block, block) for block in range(12)]) == []
    assert torch.equal(rig.blocks[0], before.flip(0))
    rig.transfers.close()


def test_a_flipped_bit_in_host_memory_fails_that_copy_and_clears_its_block(rig: Rig) -> None:
    assert rig.run("to_host", OUT) == []
    for index, (group, _, host) in enumerate(OUT):
        memory = rig.host.memory(group, host)
        memory[100] ^= 1 << index
        assert rig.run("to_device", BACK) == [index]
        assert not rig.blocks[group][BACK[index][1]].any()
        memory[100] ^= 1 << index
    assert rig.run("to_device", BACK) == []


def test_blocks_go_outside_and_come_back(rig: Rig) -> None:
    before = rig.blocks[0].clone()
    names = [outside(block, 0) for block in range(6)]
    assert rig.run("to_host", [(0, block, block) for block in range(6)]) == []
    assert rig.run("store", [(0, -1, block) for block in range(6)], names) == []
    assert rig.run("fetch", [(0, -1, 20 + block) for block in range(6)], names) == []
    assert rig.run("to_device", [(0, 6 + block, 20 + block) for block in range(6)]) == []
    assert torch.equal(rig.blocks[0][6:], before[:6])


def test_copies_wait_for_the_steps_before_them_and_nobody_waits_for_copies(rig: Rig) -> None:
    before = rig.blocks[0].clone()
    assert rig.run("to_host", [(0, 1, 1)]) == []
    torch.cuda._sleep(BUSY_CYCLES)
    rig.blocks[0][0] = 7
    kept = rig.blocks[0][5].clone()
    began = time.monotonic()
    rig.submit("to_host", [(0, 0, 0)])
    rig.submit("to_device", [(0, 5, 1)])
    assert rig.transfers.poll() == []
    assert time.monotonic() - began < 0.1
    assert [result.failed for result in rig.collect(2)] == [[], []]
    # What was launched before saw the old block, and is what was copied.
    assert set(rig.host.memory(0, 0)) == {7}
    assert torch.equal(kept, before[5])
    assert torch.equal(rig.blocks[0][5], before[1])


def test_steps_go_on_while_many_blocks_are_copied() -> None:
    """4 GB each way on the side streams; small work on the computing one does not queue behind them."""
    rig = Rig([(36, 2, 8, 32, 128)], num_host_blocks=NUM_BLOCKS)
    everything = [(0, block, block) for block in range(NUM_BLOCKS)]
    assert rig.run("to_host", everything) == []
    x = torch.ones(1024, device="cuda")
    x.add_(1)
    torch.cuda.synchronize()
    for _ in range(140):
        rig.submit("to_host", everything[:6])
        rig.submit("to_device", everything[6:])
    began, num_steps = time.monotonic(), 0
    results = 0
    longest = 0.0
    while results < 280:
        start = time.monotonic()
        x.add_(1)
        torch.cuda.current_stream().synchronize()
        longest = max(longest, time.monotonic() - start)
        num_steps += 1
        results += len(rig.transfers.poll())
    took = time.monotonic() - began
    assert took > 0.02 and num_steps > 50 and longest < took / 4
    rig.transfers.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_submit_and_poll_do_not_wait_for_the_gpu(rig: Rig) -> None:
    rig.run("to_host", OUT)
    rig.run("to_device", BACK)
    results: list[TransferResult] = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            rig.submit("to_device", BACK)
            rig.submit("to_host", [(group, device, host + 10) for group, device, host in OUT if host < 30])
            results += rig.transfers.poll()
        results += rig.collect(20 - len(results))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [result.failed for result in results] == [[]] * 20


def test_graphs_are_captured_while_blocks_move_and_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "SLICE_BYTES", 1 << 20)
    rig = Rig()
    late = HostCache(HostLayout.side_by_side([1 << 20], 2000), pin_for_cuda, unpin_for_cuda)
    x = torch.zeros(64, device="cuda")
    graphs = []
    for turn in range(30):
        rig.submit("to_host", OUT)
        rig.submit("to_device", [(1, 9, 20)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x.add_(turn)
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    assert x.unique().tolist() == [sum(range(30))]
    results = rig.collect(60)
    assert sum(len(result.failed) for result in results) == 30, "host block 20 was never filled, the others were"
    late.close()
    rig.transfers.close()


def test_checksums_on_the_gpu_are_those_of_the_host_past_two_to_the_31() -> None:
    """Words of an arena whose last block lies beyond 2**31 bytes."""
    words = torch.zeros(600, 590_000, dtype=torch.int64, device="cuda")
    for block in (0, 455, 599):
        words[block] = torch.randint(-(2**62), 2**62, (590_000,), device="cuda")
    sums = block_checksums.choose("cuda")(words, torch.tensor([599, 0, 455, 3], dtype=torch.int32, device="cuda"))
    expected = [checksum_of(words[block].cpu().numpy().data) for block in (599, 0, 455, 3)]
    assert sums.tolist() == expected


def test_the_end_in_the_middle_of_copies_leaves_no_copy_running() -> None:
    rig = Rig()
    for _ in range(50):
        rig.submit("to_host", OUT)
        rig.submit("to_device", BACK)
    rig.transfers.close()
    torch.cuda.synchronize()
    assert rig.host.num_ready_units == 0
    # The memory is unpinned: it could be pinned again.
    again = Rig()
    assert again.run("to_host", OUT) == []
    again.transfers.close()
