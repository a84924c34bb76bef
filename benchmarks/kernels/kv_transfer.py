# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks move between a GPU and the host, beside what the link carries, as JSON.

    python -m benchmarks.kernels.kv_transfer --report_json kv_transfer.json [--prefix_tokens 16384]

Blocks of a Qwen3-8B in bf16, 32 tokens each, at scattered places on both sides. The link's own speed is that of one
pinned copy of a gigabyte, measured in the same run, alone and with one the other way at the same time.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.record import provenance
from headrace.core.transfer import BlockCopy, Transfer, TransferKind
from headrace.kernels.block_checksum import block_checksums
from headrace.worker.block_copier import CudaCopier, raw_blocks
from headrace.worker.host_cache import HostCache, HostLayout, pin_for_cuda, unpin_for_cuda
from headrace.worker.kv_transfer import KvTransfers

SHAPE = (36, 2, 8, 32, 128)
TOKENS_PER_BLOCK = SHAPE[3]
LINK_BYTES = 1 << 30
REPEATS = 7

Record = dict[str, Any]


def link_gb_s() -> dict[str, float]:
    """GB/s of one large pinned copy each way, and of both at once (the sum)."""
    host = [torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.zeros(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(directions: Sequence[int]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for direction in directions:
            with torch.cuda.stream(streams[direction]):
                target, source = (host, device) if direction == 0 else (device, host)
                target[direction].copy_(source[direction], non_blocking=True)
        torch.cuda.synchronize()
        return len(directions) * LINK_BYTES / (time.perf_counter() - began) / 1e9

    def best(directions: Sequence[int]) -> float:
        return round(max(copy(directions) for _ in range(REPEATS)), 1)

    return {"to_host": best([0]), "to_device": best([1]), "both": best([0, 1])}


class Bench:
    """Transfers of a prefix's blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.arena = torch.randn(2 * num_blocks, *SHAPE, device="cuda", dtype=torch.bfloat16)
        raw = raw_blocks(self.arena)
        self.block_bytes = raw.shape[1]
        began = time.perf_counter()
        self.host = HostCache(HostLayout.side_by_side([self.block_bytes], 2 * num_blocks), pin_for_cuda, unpin_for_cuda)
        while self.host.num_ready_units < 2 * num_blocks:
            time.sleep(0.001)
        self.pin_gb_s = 2 * num_blocks * self.block_bytes / (time.perf_counter() - began) / 1e9
        self.transfers = KvTransfers(CudaCopier([self.arena], self.host), self.host)
        rng = random.Random(0)
        device, host = (rng.sample(range(2 * num_blocks), 2 * num_blocks) for _ in range(2))
        pairs = [BlockCopy(0, *pair) for pair in zip(device, host, strict=True)]
        self.halves = pairs[:num_blocks], pairs[num_blocks:]

    def run(self, kinds: Sequence[TransferKind], blocks_per_transfer: int) -> tuple[float, float]:
        """(GB/s over all kinds together, microseconds that a submission took). The second kind has its own blocks."""
        work = []
        for kind, copies in zip(kinds, self.halves, strict=False):
            for at in range(0, len(copies), blocks_per_transfer):
                work.append(Transfer(len(work), kind, copies[at : at + blocks_per_transfer]))
        torch.cuda.synchronize()
        began = time.perf_counter()
        for transfer in work:
            self.transfers.submit(transfer)
        submitted = time.perf_counter() - began
        num_ended = 0
        while num_ended < len(work):
            time.sleep(0.0002)
            for result in self.transfers.poll():
                assert not result.failed, "a block came back wrong"
                num_ended += 1
        took = time.perf_counter() - began
        moved = len(kinds) * self.num_blocks * self.block_bytes
        return moved / took / 1e9, submitted / len(work) * 1e6

    def checksum_gb_s(self) -> float:
        """Checksums of all blocks at once."""
        words = raw_blocks(self.arena).view(torch.int64)
        ids = torch.arange(2 * self.num_blocks, dtype=torch.int32, device="cuda")
        call = block_checksums.choose("cuda")
        call(words, ids)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPEATS):
            call(words, ids)
        end.record()
        end.synchronize()
        return REPEATS * self.arena.nbytes / start.elapsed_time(end) / 1e6


def measure(prefix_tokens: int) -> Record:
    """Everything, for a prefix of so many tokens."""
    link = link_gb_s()
    bench = Bench(-(-prefix_tokens // TOKENS_PER_BLOCK))
    bench.run(["to_host"], 64)
    records = []
    kinds: dict[str, list[TransferKind]] = {
        "to_host": ["to_host"], "to_device": ["to_device"], "both": ["to_host", "to_device"]
    }  # fmt: skip
    # The second half is filled too, so that each direction has blocks of its own.
    bench.halves = bench.halves[::-1]
    bench.run(["to_host"], 64)
    for name, wanted in kinds.items():
        for blocks_per_transfer in (1, 8, 64, bench.num_blocks):
            runs = [bench.run(wanted, blocks_per_transfer) for _ in range(REPEATS)]
            rate = statistics.median(run[0] for run in runs)
            records.append(
                {
                    "direction": name,
                    "blocks_per_transfer": blocks_per_transfer,
                    "gb_s": round(rate, 1),
                    "share_of_link": round(rate / link[name], 3),
                    "submit_us": round(statistics.median(run[1] for run in runs), 1),
                    "prefix_ms": round(bench.num_blocks * bench.block_bytes * len(wanted) / rate / 1e6, 2),
                }
            )
    found = {
        "prefix_tokens": prefix_tokens,
        "block_bytes": bench.block_bytes,
        "link_gb_s": link,
        "pin_gb_s": round(bench.pin_gb_s, 2),
        "checksum_gb_s": round(bench.checksum_gb_s()),
        "transfers": records,
    }
    bench.transfers.close()
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report_json", required=True)
    parser.add_argument("--prefix_tokens", type=int, default=16384)
    options = parser.parse_args()
    found = measure(options.prefix_tokens)
    with open(options.report_json, "w") as file:
        json.dump({"provenance": provenance(), **found}, file, indent=1)
    for record in found["transfers"]:
        sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
