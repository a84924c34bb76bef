# SPDX-License-Identifier: Apache-2.0
"""Time every kernel of a Qwen3-8B-shaped layer on a GPU, beside what the card can do, as JSON.

    python -m benchmarks.kernels.bench_kernels --report_json kernels.json [--sweep] [--only decode]

Each figure is the mean of calls inside one CUDA graph whose tensors rotate past the L2 cache. The ceilings are measured
in the same run: a plain read and a cuBLAS product. `--sweep` tries other tiles for attention.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import provenance
from headrace.kernels.activation import silu_and_mul
from headrace.kernels.attention_decode import num_programs, paged_decode, plan_decode
from headrace.kernels.attention_prefill import paged_prefill
from headrace.kernels.attention_tile import Tile
from headrace.kernels.norm import fused_add_rms_norm, rms_norm
from headrace.kernels.rope import qk_norm_rope_cache_write

HIDDEN, Q_HEADS, KV_HEADS, DIM, WIDTH, BLOCK = 4096, 32, 8, 128, 12288, 32
BF16 = torch.bfloat16
ROTATE_BYTES = 300_000_000
"""Bytes that a round of rotated tensors passes over: five times the largest L2."""

Record = dict[str, Any]


def time_us(calls: list[Callable[[], Any]], repeats: int = 5) -> float:
    """Microseconds a call, best of `repeats` replays of one graph holding all the calls, at least 20."""
    calls = calls * -(-20 // len(calls))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best * 1000 / len(calls)


def rotation(nbytes: int) -> range:
    """How many copies of tensors of so many bytes to rotate over."""
    return range(max(1, min(64, ROTATE_BYTES // max(nbytes, 1))))


def ceilings() -> dict[str, float]:
    """GB/s of a read and TFLOP/s of a bf16 product, measured."""
    big = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    read = 4 * big.numel() / time_us([lambda: big.sum()]) / 1e3
    a = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    matmul = 2 * 8192**3 / time_us([lambda: a @ a]) / 1e6
    return {"read_gb_s": round(read), "matmul_tflop_s": round(matmul)}


def bench_layer_ops() -> Iterator[Record]:
    """Norms, activation and the fused rotary write."""
    table = torch.randn(4096, DIM, device="cuda")
    weight = torch.randn(HIDDEN, device="cuda", dtype=BF16)
    head_weight = torch.randn(DIM, device="cuda", dtype=BF16)
    qkv_width = (Q_HEADS + 2 * KV_HEADS) * DIM
    norm, add_norm, silu, write = (
        op.choose("cuda") for op in (rms_norm, fused_add_rms_norm, silu_and_mul, qk_norm_rope_cache_write)
    )
    for tokens in (1, 64, 2048, 8192):
        copies = rotation(tokens * HIDDEN * 2)
        xs = [torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16) for _ in copies]
        residual = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16)
        row = tokens * 2
        yield record("rms_norm", tokens, [lambda x=x: norm(x, weight, 1e-6) for x in xs], 2 * row * HIDDEN)
        calls = [lambda x=x, residual=residual: add_norm(x, residual, weight, 1e-6) for x in xs]
        yield record("fused_add_rms_norm", tokens, calls, 4 * row * HIDDEN)
        wide = [torch.randn(tokens, 2 * WIDTH, device="cuda", dtype=BF16) for _ in rotation(tokens * WIDTH * 4)]
        yield record("silu_and_mul", tokens, [lambda x=x: silu(x) for x in wide], 3 * row * WIDTH)
        qkvs = [torch.randn(tokens, qkv_width, device="cuda", dtype=BF16) for _ in rotation(row * qkv_width)]
        cache = torch.zeros(tokens // BLOCK + 1, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=BF16)
        slots = torch.arange(tokens, device="cuda")
        rest = (head_weight, head_weight, 1e-6, table, slots % 4096, cache, slots, Q_HEADS, KV_HEADS, DIM)
        calls = [lambda x=x, rest=rest: write(x, *rest) for x in qkvs]
        yield record("qk_norm_rope_cache_write", tokens, calls, 2 * row * qkv_width)


def record(name: str, size: Any, calls: list[Callable[[], Any]], nbytes: int = 0, flops: int = 0) -> Record:
    """Time and rate of one kernel at one size."""
    us = time_us(calls)
    found: Record = {"kernel": name, "size": size, "us": round(us, 2)}
    if nbytes:
        found["gb_s"] = round(nbytes / us / 1e3)
    if flops:
        found["tflop_s"] = round(flops / us / 1e6)
    return found


def paged(lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """An arena of several layers with rows scattered over it, their block table and lengths."""
    counts = [-(-length // BLOCK) for length in lens]
    block_bytes = 2 * KV_HEADS * BLOCK * DIM * 2
    layers = max(1, min(16, ROTATE_BYTES // (sum(counts) * block_bytes)))
    arena = torch.randn(sum(counts), layers, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=BF16)
    order = torch.randperm(sum(counts), device="cuda").int()
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32, device="cuda")
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[used : used + count]
        used += count
    return arena, table, torch.tensor(lens, dtype=torch.int32, device="cuda")


def decode_call(lens: list[int], tile: Tile | None, programs: int) -> list[Callable[[], Any]]:
    """One call per layer of an arena; the plan is made once, as in a step."""
    arena, table, seq_lens = paged(lens)
    q = torch.randn(len(lens), Q_HEADS, DIM, device="cuda", dtype=BF16)
    out = torch.empty(len(lens), Q_HEADS * DIM, device="cuda", dtype=BF16)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda")
    plan = plan_decode(seq_lens, len(lens), Q_HEADS, KV_HEADS, DIM, None, programs)
    scale = DIM**-0.5
    return [
        lambda layer=layer: paged_decode(
            q, arena[:, layer], out, plan, table, starts, seq_lens, scale, None, None, tile
        )
        for layer in range(arena.shape[1])
    ]


DECODES = {
    "1x1k": [1152],
    "1x8k": [8192],
    "1x32k": [32768],
    "8x1k": [1152] * 8,
    "64x1k": [1152] * 64,
    "64x128-8k": [128 + 128 * row for row in range(63)] + [8192],
    "63x256+1x32k": [256] * 63 + [32768],
    "256x1k": [1152] * 256,
}


def bench_decode(sweep: bool) -> Iterator[Record]:
    """Split-KV decode, with its reduction, by the bytes of K and V."""
    programs = num_programs(torch.device("cuda"))
    tiles: list[tuple[Tile | None, int]] = [(None, programs)]
    if sweep:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        tiles += [
            (Tile(16, block_n, warps, stages), sms * per_sm)
            for block_n, warps, stages in ((32, 4, 3), (64, 2, 3), (64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 8, 3))
            for per_sm in (2, 4, 8, 16)
        ]
    for name, lens in DECODES.items():
        for tile, aim in tiles:
            found = record("paged_decode", name, decode_call(lens, tile, aim), sum(lens) * KV_HEADS * DIM * 4)
            yield found | ({"tile": str(tile), "programs": aim} if sweep else {})
    seq_lens = torch.full((64,), 1152, dtype=torch.int32, device="cuda")
    yield record("plan_decode", 64, [lambda: plan_decode(seq_lens, 64, Q_HEADS, KV_HEADS, DIM, None, programs)])


PREFILLS = {"512": (0, 512), "2048": (0, 2048), "8192": (0, 8192), "32768": (0, 32768), "2048 after 6144": (6144, 2048)}


def bench_prefill(sweep: bool) -> Iterator[Record]:
    """Causal prefill over paged KV beside torch's own over contiguous K and V."""
    tiles: list[Tile | None] = [None]
    if sweep:
        tiles += [
            Tile(*shape)
            for shape in (
                (128, 32, 4, 3), (128, 32, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 4),
                (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3), (256, 64, 8, 2),
            )
        ]  # fmt: skip
    for name, (cached, new) in PREFILLS.items():
        length = cached + new
        flops = 4 * Q_HEADS * DIM * (new * cached + new * (new + 1) // 2)
        arena, table, seq_lens = paged([length])
        q = torch.randn(new, Q_HEADS, DIM, device="cuda", dtype=BF16)
        out = torch.empty(new, Q_HEADS * DIM, device="cuda", dtype=BF16)
        starts = torch.tensor([0, new], dtype=torch.int32, device="cuda")
        for tile in tiles:
            args = (q, arena[:, 0], out, table, starts, seq_lens, 0, 1, new, DIM**-0.5, None, None, tile)
            try:
                found = record("paged_prefill", name, [lambda args=args: paged_prefill(*args)], flops=flops)
            except Exception as error:
                found = {"kernel": "paged_prefill", "size": name, "error": type(error).__name__}
            yield found | ({"tile": str(tile)} if sweep else {})
        if cached == 0:
            k, v = (torch.randn(1, Q_HEADS, length, DIM, device="cuda", dtype=BF16) for _ in range(2))
            query = q.transpose(0, 1)[None]
            call = [lambda q=query, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)]
            yield record("torch sdpa, contiguous", name, call, flops=flops)


def main() -> None:
    """Run, and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report_json", help="write the JSON here instead of to the terminal")
    parser.add_argument("--sweep", action="store_true", help="try other attention tiles")
    parser.add_argument("--only", choices=["ops", "decode", "prefill"], help="time these alone")
    args = parser.parse_args()
    limits = ceilings()
    parts = {
        "ops": bench_layer_ops,
        "decode": lambda: bench_decode(args.sweep),
        "prefill": lambda: bench_prefill(args.sweep),
    }
    results = []
    for name, part in parts.items():
        if args.only in (None, name):
            for found in part():
                if "gb_s" in found:
                    found["of_roofline"] = round(found["gb_s"] / limits["read_gb_s"], 3)
                if "tflop_s" in found:
                    found["of_roofline"] = round(found["tflop_s"] / limits["matmul_tflop_s"], 3)
                sys.stderr.write(json.dumps(found) + "\n")
                results.append(found)
    report = {
        "benchmark": "kernels",
        "shape": "Qwen3-8B layer, bf16",
        "ceilings": limits,
        "results": results,
    } | provenance()
    text = json.dumps(report, indent=1)
    if args.report_json:
        with open(args.report_json, "w") as file:
            file.write(text + "\n")
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
