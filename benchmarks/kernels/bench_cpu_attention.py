# SPDX-License-Identifier: Apache-2.0
"""Time the ways to decode over paged fp32 KV on the CPU, beside the one that VANILLA takes.

    OMP_WAIT_POLICY=passive python benchmarks/kernels/bench_cpu_attention.py --threads 1

Microseconds per layer, best of several steps over 30 layers, SmolLM2-135M's heads (9/3 of 64), blocks of 32 tokens.
The ways take turns, so that a busy neighbour hurts them alike.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention.base import AttentionMetadata, AttentionNeed
from headrace.attention.reference import VanillaAttention

LAYERS, Q_HEADS, KV_HEADS, DIM, BLOCK = 30, 9, 3, 64, 32
SCALE = DIM**-0.5
SHAPES = ((1, 150), (1, 500), (1, 2000), (8, 150), (8, 500), (16, 100))
"""(rows, tokens of each)"""


class Step:
    """One decode step over rows of one length, blocks scattered."""

    def __init__(self, rows: int, length: int) -> None:
        blocks = -(-length // BLOCK)
        self.rows, self.length, self.blocks = rows, length, blocks
        self.arena = torch.randn(rows * blocks + 4, LAYERS, 2, KV_HEADS, BLOCK, DIM)
        self.layers = [self.arena[:, layer] for layer in range(LAYERS)]
        self.table = torch.randperm(rows * blocks + 4)[: rows * blocks].view(rows, blocks)
        self.q = torch.randn(rows, Q_HEADS, DIM)
        self.packed = self.q.view(rows, KV_HEADS, -1, DIM)
        need = AttentionNeed(Q_HEADS, KV_HEADS, DIM, SCALE, dtype="bfloat16", kv_dtype="float32")
        self.backends = [VanillaAttention(need) for _ in range(LAYERS)]

    def metadata(self) -> AttentionMetadata:
        """Made anew for each step, as the worker does, so that the plan's cost counts."""
        rows, length = self.rows, self.length
        return AttentionMetadata(
            num_tokens=rows,
            num_rows=rows,
            num_decode_rows=rows,
            first_prefill_row=rows,
            max_query_len=1,
            max_seq_len=length,
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
            seq_lens=torch.full((rows,), length, dtype=torch.int32),
            positions=torch.full((rows,), length - 1),
            block_tables=(self.table.int(),),
            slot_mapping=(torch.zeros(rows, dtype=torch.long),),
        )

    def gathered(self, layer: int, row: int) -> Tensor:
        """A row's K and V [2, num_kv_heads, length, head_dim], copied block by block."""
        kv = self.layers[layer].index_select(0, self.table[row]).permute(1, 2, 0, 3, 4)
        return kv.reshape(2, KV_HEADS, -1, DIM)[:, :, : self.length]


def vanilla(step: Step) -> None:
    """The backend: tiles gathered head by head, packed queries, short rows together."""
    metadata = step.metadata()
    for backend, layer in zip(step.backends, step.layers, strict=True):
        backend.forward(step.q, layer, metadata, 0)


def unpacked(step: Step) -> None:
    """Blocks gathered whole, one call a row, query heads not packed."""
    for layer in range(LAYERS):
        for row in range(step.rows):
            k, v = step.gathered(layer, row).unsqueeze(1)
            F.scaled_dot_product_attention(step.q[row][None, :, None], k, v, scale=SCALE, enable_gqa=True)


def products(step: Step) -> None:
    """Blocks gathered whole, two batched products and a softmax."""
    for layer in range(LAYERS):
        for row in range(step.rows):
            k, v = step.gathered(layer, row)
            scores = torch.bmm(step.packed[row], k.transpose(1, 2)).mul_(SCALE)
            torch.bmm(scores.softmax(-1), v)


def in_place(step: Step) -> None:
    """Nothing gathered: what contiguous K and V would take."""
    for layer in range(LAYERS):
        for row in range(step.rows):
            size = 2 * KV_HEADS * step.length * DIM
            at = (layer * step.rows + row) * size
            k, v = step.arena.view(-1)[at : at + size].view(2, 1, KV_HEADS, step.length, DIM)
            F.scaled_dot_product_attention(step.packed[row : row + 1], k, v, scale=SCALE)


def main() -> None:
    """Run, and write one JSON object a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--repeats", type=int, default=15, help="steps to take the best of")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ways: tuple[Callable[[Step], None], ...] = (vanilla, unpacked, products, in_place)
    with torch.inference_mode():
        for rows, length in SHAPES:
            step = Step(rows, length)
            best = dict.fromkeys((way.__name__ for way in ways), float("inf"))
            for _ in range(args.repeats):
                for way in ways:
                    start = time.perf_counter()
                    way(step)
                    best[way.__name__] = min(best[way.__name__], time.perf_counter() - start)
            us = {name: round(seconds / LAYERS * 1e6, 1) for name, seconds in best.items()}
            sys.stdout.write(json.dumps({"rows": rows, "tokens": length, "threads": args.threads, "us": us}) + "\n")


if __name__ == "__main__":
    main()
