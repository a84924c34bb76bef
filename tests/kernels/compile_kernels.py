# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel for one GPU target, without a GPU: `python compile_kernels.py 90`.

Writes one JSON line per kernel: its name, the shared memory it takes, and what stopped it, if anything did. A process
of its own, because the interpreter, which the other tests use, is chosen when a kernel is defined.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import headrace.kernels
from headrace.kernels.activation_triton import gated_kernel
from headrace.kernels.attention_decode import decode_kernel, plan_kernel, reduce_kernel
from headrace.kernels.attention_prefill import prefill_kernel
from headrace.kernels.attention_tile import SHARED_MEMORY, block_dim, decode_tile, prefill_tile
from headrace.kernels.kv_cache_triton import copy_blocks_kernel
from headrace.kernels.norm_triton import fused_add_rms_norm_kernel, rms_norm_kernel
from headrace.kernels.rope_triton import qk_norm_rope_cache_write_kernel

# Argument types by name; all others are int32. Pointers and numbers are multiples of 16, as they are at a real launch.
POINTERS = {
    "fp32": ("table", "partial", "partial_lse"),
    "i32": ("block_table", "query_start_loc", "seq_lens", "item_row", "row_items"),
    "i64": ("positions", "slots", "pairs"),
}
MODEL_POINTERS = ("x", "weight", "out", "residual", "qkv", "q_norm", "k_norm", "q", "cache", "arena")
FLOATS = ("eps", "offset", "scale_log2", "softcap")
UNALIGNED = ("first_row", "num_rows", "num_items", "target", "num_q_heads", "num_kv_heads")

Variant = tuple[Any, dict[str, Any], int, int, str]
"""kernel, constexprs, num_warps, num_stages, dtype of the model's tensors."""


def attention_variants(shared: int) -> Iterator[Variant]:
    """Head widths with tiles of their own, one that is no power of two, and the longest code path."""
    for head_dim, group_size, window, softcap, dtype in (
        (64, 3, 0, False, "bf16"),
        (80, 1, 0, False, "bf16"),
        (128, 4, 0, False, "bf16"),
        (128, 8, 512, True, "bf16"),
        (256, 4, 512, False, "bf16"),
        (8, 2, 0, False, "fp32"),
        (256, 2, 0, False, "fp32"),
    ):
        size = 4 if dtype == "fp32" else 2
        common = {
            "GROUP_SIZE": group_size,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": block_dim(head_dim),
            "TOKENS_PER_BLOCK": 32,
            "WINDOW": window,
            "HAS_SOFTCAP": softcap,
        }
        for kernel, tile in (
            (prefill_kernel, prefill_tile(head_dim, size, shared)),
            (decode_kernel, decode_tile(head_dim, size, group_size, shared)),
        ):
            blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
            yield kernel, common | blocks, tile.num_warps, tile.num_stages, dtype


def variants(shared: int) -> Iterator[Variant]:
    """Every kernel, with the constants of common models."""
    yield rms_norm_kernel, {"BLOCK": 4096}, 8, 3, "bf16"
    yield fused_add_rms_norm_kernel, {"BLOCK": 4096}, 8, 3, "bf16"
    yield gated_kernel, {"BLOCK": 1024, "IS_GELU": False}, 4, 3, "bf16"
    yield gated_kernel, {"BLOCK": 1024, "IS_GELU": True}, 4, 3, "bf16"
    yield copy_blocks_kernel, {"BLOCK": 4096}, 8, 3, "bf16"
    heads = {"HAS_Q_NORM": True, "HAS_K_NORM": True, "HAS_ROPE": True}
    whole = {"HEAD_DIM": 128, "HALF": 64, "BLOCK_HEADS": 8, "BLOCK_HALF": 64, "BLOCK_REST": 1}
    part = {"HEAD_DIM": 80, "HALF": 16, "BLOCK_HEADS": 32, "BLOCK_HALF": 16, "BLOCK_REST": 64}
    yield qk_norm_rope_cache_write_kernel, whole | heads, 4, 3, "bf16"
    yield qk_norm_rope_cache_write_kernel, part | heads, 4, 3, "bf16"
    yield plan_kernel, {"WINDOW": 512, "MIN_CHUNK": 64, "BLOCK_ROWS": 256, "BLOCK_ITEMS": 32}, 4, 3, "bf16"
    yield reduce_kernel, {"HEAD_DIM": 128, "BLOCK_DIM": 128, "BLOCK_ITEMS": 16}, 4, 3, "bf16"
    yield from attention_variants(shared)


def compile_one(variant: Variant, arch: int) -> int:
    """Bytes of shared memory that the compiled kernel takes."""
    kernel, constants, num_warps, num_stages, dtype = variant
    pointer = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names}
    pointer |= dict.fromkeys(MODEL_POINTERS, f"*{dtype}")
    if kernel is qk_norm_rope_cache_write_kernel:
        pointer["table"] = "*fp32"
    signature, constexprs, attrs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants[name]
        else:
            signature[name] = pointer.get(name, "fp32" if name in FLOATS else "i32")
            if signature[name] != "fp32" and name not in UNALIGNED:
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
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
    for variant in variants(SHARED_MEMORY[arch]):
        name = variant[0].__name__
        done.add(name)
        report: dict[str, Any] = {"kernel": name, "constants": variant[1], "shared": 0, "error": None}
        try:
            report["shared"] = compile_one(variant, arch)
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.write(json.dumps({"missing": sorted(all_kernels() - done)}) + "\n")


if __name__ == "__main__":
    main()
