# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel for one GPU target, without a GPU: `python compile_kernels.py 90`.

Writes one JSON line per kernel: its name, the shared memory it takes, and what stopped it, if anything did. A process
of its own, because the interpreter, which the other tests use, is chosen when a kernel is defined.
"""

import importlib
import itertools
import json
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import headrace.kernels
from headrace.kernels.activation_triton import gated_kernel
from headrace.kernels.attention_decode import FEW_ITEMS, decode_kernel, reduce_kernel
from headrace.kernels.attention_plan import PLAN_ITEMS, PLAN_ROWS, RECORD, UNIT, plan_kernel
from headrace.kernels.attention_prefill import prefill_kernel
from headrace.kernels.attention_tile import SHARED_MEMORY, block_dim, decode_tile, prefill_tile
from headrace.kernels.batch_prep_triton import (
    advance_rows_kernel,
    apply_writes_kernel,
    gather_blocks_kernel,
    gather_tokens_kernel,
    store_tokens_kernel,
)
from headrace.kernels.block_checksum_triton import BLOCK as CHECKSUM_BLOCK
from headrace.kernels.block_checksum_triton import TILES, block_checksums_kernel
from headrace.kernels.fixed_tile_triton import BLOCK_K as FIXED_K
from headrace.kernels.fixed_tile_triton import BLOCK_K_FP32, GROUP_M, NUM_STAGES, fixed_tile_kernel
from headrace.kernels.fixed_tile_triton import BLOCK_M as FIXED_M
from headrace.kernels.fixed_tile_triton import BLOCK_N as FIXED_N
from headrace.kernels.greedy_triton import argmax_kernel, argmax_part_kernel
from headrace.kernels.kv_cache_triton import copy_blocks_kernel, gather_row_kernel
from headrace.kernels.logprobs_triton import normaliser_kernel
from headrace.kernels.merge_triton import merge_attention_kernel
from headrace.kernels.norm_triton import fused_add_rms_norm_kernel, rms_norm_kernel
from headrace.kernels.read_triton import BLOCK, PIECE, read_sums_kernel
from headrace.kernels.rope_triton import qk_norm_rope_cache_write_kernel
from headrace.kernels.sampling_triton import draw_kernel, filter_threshold_kernel, uniforms_kernel
from headrace.kernels.skinny_matrix import BLOCK_M, BLOCK_N, matrix_kernel, matrix_tile
from headrace.kernels.skinny_triton import vector_kernel, vector_tile

# Argument types by name, unless a variant says otherwise; all others are int32. Pointers and numbers are multiples of
# 16, as they are at a real launch, except those a kernel is not specialised on.
TYPES = {
    "fp32": ("eps", "offset", "scale_log2", "softcap"),
    "*fp32": (
        "part_value", "lse", "other_lse", "partial", "partial_lse", "kv_scale", "logits", "top_p", "min_p",
        "thresholds",
    ),
    "*fp64": ("uniform",),
    "*i32": (
        "block_table", "query_start_loc", "seq_lens", "items", "share_items", "row_items", "row_units", "state",
        "staged", "rows", "tables",
        "num_computed_tokens", "token_ids", "sample_rows", "part_index", "counters", "choices", "top_k",
    ),
    "*i64": ("positions", "slots", "pairs", "input_ids", "slot_mapping", "sampled", "seeds"),
    "*model": ("x", "weight", "bias", "out", "residual", "qkv", "q_norm", "k_norm", "q", "arena", "other"),
}  # fmt: skip


CACHE_TYPES = {"plain": "*model", "fp8": "*u8", "fp8_native": "*u8", "int8": "*i8"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its constants, what launches it, and argument types of its own."""

    kernel: Any
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    model_dtype: str = "bf16"
    types: dict[str, str] = field(default_factory=dict)

    def type_of(self, name: str) -> str:
        """An argument's type as Triton spells it."""
        by_name = {argument: kind for kind, names in TYPES.items() for argument in names}
        kind = {"cache": CACHE_TYPES[self.constants.get("KV", "plain")]}.get(name, by_name.get(name, "i32"))
        return self.types.get(name, kind).replace("model", self.model_dtype)


# Targets with shared memory like another's compile what takes most of it; these compile all shapes.
ALL_SHAPES = (80, 86, 90)


def fp8_kind(arch: int) -> str:
    """How kernels read e4m3 there."""
    return "fp8_native" if arch >= 89 else "fp8"


def attention_variants(arch: int) -> Iterator[Variant]:
    """Head widths with tiles of their own, one that is no power of two, every kind of cache, the longest code path."""
    shared, fp8 = SHARED_MEMORY[arch], fp8_kind(arch)
    shapes = (
        (128, 8, 512, True, "bf16", "plain"),
        (256, 4, 512, False, "bf16", "plain"),
        (128, 4, 0, False, "bf16", fp8),
        (128, 4, 0, False, "bf16", "int8"),
        (256, 4, 512, True, "bf16", fp8),
        (256, 4, 512, True, "bf16", "int8"),
        (64, 3, 0, False, "bf16", "plain"),
        (80, 1, 0, False, "bf16", "plain"),
        (80, 1, 0, False, "bf16", fp8),
        (80, 1, 0, False, "fp16", "int8"),
        (128, 4, 0, False, "bf16", "plain"),
        (8, 2, 0, False, "fp32", "plain"),
        (256, 2, 0, False, "fp32", "plain"),
        (256, 2, 0, False, "fp32", fp8),
        (256, 2, 0, False, "fp32", "int8"),
    )
    for head_dim, group_size, window, softcap, dtype, kv in shapes if arch in ALL_SHAPES else shapes[:4]:
        size = 4 if dtype == "fp32" else 2
        common = {
            "GROUP_SIZE": group_size,
            "HEAD_DIM": head_dim,
            "TOKEN_STRIDE": head_dim,
            "BLOCK_DIM": block_dim(head_dim),
            "TOKENS_PER_BLOCK": 32,
            "WINDOW": window,
            "HAS_SOFTCAP": softcap,
            "KV": kv,
        }
        for kernel, tile in (
            (prefill_kernel, prefill_tile(head_dim, size, shared)),
            (decode_kernel, decode_tile(head_dim, size, group_size, shared)),
        ):
            blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
            for own in ({"RECORD": RECORD},) if kernel is decode_kernel else ({"ALIKE": False}, {"ALIKE": True}):
                yield Variant(kernel, common | blocks | own, tile.num_warps, tile.num_stages, dtype)


def layer_variants(arch: int) -> Iterator[Variant]:
    """Norms, activations, rotary and copies, with the constants of common models."""
    yield Variant(rms_norm_kernel, {"BLOCK": 4096}, 8)
    yield Variant(fused_add_rms_norm_kernel, {"BLOCK": 4096}, 8)
    yield Variant(gated_kernel, {"BLOCK": 1024, "IS_GELU": False})
    yield Variant(gated_kernel, {"BLOCK": 1024, "IS_GELU": True})
    yield Variant(copy_blocks_kernel, {"BLOCK": 4096}, 8, types={"arena": "*i16"})
    words = {"words": "*i64", "ids": "*i32", "partial": "*i64"}
    yield Variant(block_checksums_kernel, {"BLOCK": CHECKSUM_BLOCK, "TILES": TILES}, types=words)
    head = {"HEAD_DIM": 128, "BLOCK_DIM": 128}
    kinds = ("plain", fp8_kind(arch), "int8")
    for kv in kinds:
        constants = head | {"TOKENS_PER_BLOCK": 32, "BLOCK": 64, "KV": kv}
        yield Variant(gather_row_kernel, constants, types={"table": "*i32"})
    yield Variant(merge_attention_kernel, head | {"BLOCK": 32})
    yield Variant(read_sums_kernel, {"PIECE": PIECE, "BLOCK": BLOCK}, 8, types={"out": "*fp32"})
    heads = {"HAS_Q_NORM": True, "HAS_K_NORM": True, "HAS_ROPE": True}
    whole = {"HEAD_DIM": 128, "HALF": 64, "BLOCK_HEADS": 8, "BLOCK_HALF": 64, "BLOCK_REST": 1}
    part = {"HEAD_DIM": 80, "HALF": 16, "BLOCK_HEADS": 32, "BLOCK_HALF": 16, "BLOCK_REST": 64}
    for shape, kv in itertools.product((whole, part), kinds):
        yield Variant(qk_norm_rope_cache_write_kernel, shape | heads | {"KV": kv}, types={"table": "*fp32"})


def product_variants() -> Iterator[Variant]:
    """Products of a row or two: pieces of a power of two and not, with all that can be fused."""
    cases = ((4096, False, True), (12288, False, False), (4096, True, False), (2880, True, False))
    for in_features, gated, has_bias in cases:
        tile = vector_tile(in_features, gated)
        parts = -(-in_features // tile.block_k)
        even = {"K_EVEN": parts * tile.block_k == in_features, "N_EVEN": True}
        shape = {"NUM_ROWS": 2, "PARTS": parts, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
        fused = {"HAS_BIAS": has_bias, "GATED": gated, "IS_GELU": gated}
        yield Variant(vector_kernel, shape | even | fused, tile.num_warps)
    for in_features, out_features, gated in ((4096, 4096, False), (4096, 6144, False), (4096, 12288, True)):
        cut = matrix_tile(in_features, out_features, gated)
        assert cut is not None
        shape = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": cut.block_k, "SPLIT": cut.split}
        part = {"PART": in_features // cut.split, "LINES": 8, "HAS_BIAS": not gated, "GATED": gated, "IS_GELU": False}
        yield Variant(matrix_kernel, shape | part, cut.num_warps, cut.num_stages)
    for dtype, block_k in (("bf16", FIXED_K), ("fp32", BLOCK_K_FP32)):
        tile = {"BLOCK_M": FIXED_M, "BLOCK_N": FIXED_N, "BLOCK_K": block_k, "GROUP_M": GROUP_M}
        for split, even in ((8, True), (1, True), (1, False)):
            own = {"SPLIT": split, "PART": 4096 // split, "K_EVEN": even, "HAS_BIAS": even}
            yield Variant(fixed_tile_kernel, tile | own, 4, NUM_STAGES, dtype)


def step_variants() -> Iterator[Variant]:
    """What runs once a step: gathering the batch, plans, sampling."""
    plan = {"WINDOW": 512, "UNIT": UNIT, "RECORD": RECORD, "BLOCK_ROWS": PLAN_ROWS[1], "BLOCK_ITEMS": PLAN_ITEMS}
    yield Variant(plan_kernel, plan, 8)
    reduced = {"HEAD_DIM": 128, "BLOCK_DIM": 128, "RECORD": RECORD}
    yield Variant(reduce_kernel, reduced | {"BLOCK_ITEMS": FEW_ITEMS}, 1)
    yield Variant(reduce_kernel, reduced | {"BLOCK_ITEMS": 4 * FEW_ITEMS})
    yield Variant(apply_writes_kernel, {"RECORD": 4, "BLOCK": 1024})
    yield Variant(gather_tokens_kernel, {"BLOCK": 1024})
    yield Variant(gather_blocks_kernel, {"TOKENS_PER_BLOCK": 32, "BLOCK": 1024})
    yield Variant(advance_rows_kernel, {"BLOCK": 1024})
    yield Variant(store_tokens_kernel, {"BLOCK": 1024}, types={"num_tokens": "*i32"})
    yield Variant(argmax_part_kernel, {"BLOCK": 4096}, 8, types={"logits": "*model"})
    yield Variant(argmax_kernel, {"BLOCK": 64}, types={"out": "*i64"})
    yield Variant(uniforms_kernel, {"BLOCK": 256}, types={"positions": "*i32", "out": "*fp64"})
    yield Variant(filter_threshold_kernel, {"BLOCK": 4096}, 8, types={"out": "*fp32"})
    yield Variant(normaliser_kernel, {"BLOCK": 4096}, 8, types={"out": "*fp32"})
    yield Variant(draw_kernel, {"HAS_THRESHOLD": True, "BLOCK": 4096}, 8, types={"out": "*i64"})


def compile_one(variant: Variant, arch: int) -> int:
    """Bytes of shared memory that the compiled kernel takes."""
    signature, constexprs, attrs = {}, {}, {}
    own = variant.constants | ({"PDL": arch >= 90} if "PDL" in variant.kernel.arg_names else {})
    for index, parameter in enumerate(variant.kernel.params):
        name = parameter.name
        if name in own:
            signature[name] = "constexpr"
            constexprs[(index,)] = own[name]
            continue
        signature[name] = variant.type_of(name)
        if not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment or signature[name] == "fp32"):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return int(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).metadata.shared)


def all_kernels() -> set[str]:
    """The names of the kernels that are launched: those called ..._kernel in any module of the package."""
    names = set()
    for module in pkgutil.iter_modules(headrace.kernels.__path__, "headrace.kernels."):
        found = vars(importlib.import_module(module.name))
        names |= {name for name, value in found.items() if isinstance(value, triton.JITFunction) and "_kernel" in name}
    return names


def main() -> None:
    """Compile and report."""
    arch = int(sys.argv[1])
    done = set()
    variants = itertools.chain(layer_variants(arch), step_variants(), product_variants(), attention_variants(arch))
    for variant in variants:
        name = variant.kernel.__name__
        done.add(name)
        report: dict[str, Any] = {"kernel": name, "constants": variant.constants, "shared": 0, "error": None}
        try:
            report["shared"] = compile_one(variant, arch)
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.write(json.dumps({"missing": sorted(all_kernels() - done)}) + "\n")


if __name__ == "__main__":
    main()
