# SPDX-License-Identifier: Apache-2.0
"""What a device has and what the parts of a worker take, for the ledger that sizes the KV cache."""

import resource
from collections.abc import Sequence

import torch

from headrace.attention.reference import MAX_COPY_BYTES
from headrace.config.dtype import BYTES
from headrace.config.resolve import ResolvedConfig
from headrace.core.kv_cache_spec import KvGroup
from headrace.core.ledger import MemoryLedger, MemoryNeeds, MemoryWish, plan_memory
from headrace.utils.machine import available_memory
from headrace.utils.math import cdiv

MODEST_CPU_TOKENS = 65_536
"""KV tokens that a CPU worker takes unasked, if a quarter of the free memory holds them."""
MODEST_CPU_REQUESTS = 4
"""Or this many requests of `max_seq_len`."""
MODEST_CPU_SHARE = 0.25


def in_use_before(device: torch.device) -> int:
    """Bytes of a GPU that others, and the driver for us, use before the start."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def usage(device: torch.device) -> dict[str, int]:
    """Bytes: the most this process has taken since start, and all there are. On a CPU, of the process's memory."""
    if device.type == "cpu":
        # In KiB on Linux.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {"peak_bytes": peak, "total_bytes": peak + available_memory()}
    return {
        "peak_bytes": torch.cuda.max_memory_reserved(device),
        "total_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


def share_host(config: ResolvedConfig, groups: Sequence[KvGroup]) -> MemoryLedger:
    """A modest part of a CPU's memory: untouched blocks cost nothing, but a full cache would stay full.

    It always holds one request of `max_seq_len`; a share or a number of tokens that the user asks for is kept.
    """
    free = available_memory()
    per_block = sum(group.bytes_per_block(config.tokens_per_block) for group in groups)
    settings = config.args.kv_cache_config
    asked = settings.free_gpu_memory_fraction
    tokens = settings.max_tokens
    if tokens is None and asked == "auto":
        share = int(free * MODEST_CPU_SHARE) // per_block * config.tokens_per_block
        modest = max(MODEST_CPU_TOKENS, MODEST_CPU_REQUESTS * config.max_seq_len)
        tokens = max(min(modest, share), config.max_seq_len)
    needs = MemoryNeeds(
        total_bytes=free,
        weight_bytes=0,
        activation_bytes_per_token=0,
        kv_bytes_per_block=per_block,
        tokens_per_block=config.tokens_per_block,
        fixed_bytes=MAX_COPY_BYTES * config.model.num_layers,
        device="the host (free after the weights)",
    )
    return plan_memory(needs, _wish(config, per_block, tokens))


def share_gpu(
    config: ResolvedConfig, groups: Sequence[KvGroup], in_use: int, weights: int, fixed: int, peak: int
) -> MemoryLedger:
    """All of a GPU but what was measured and the reserve. In bytes: in use before the start, of the weights, of the
    rows and buffers, and the peak of the largest step."""
    _, total = torch.cuda.mem_get_info()
    per_block = sum(group.bytes_per_block(config.tokens_per_block) for group in groups)
    needs = MemoryNeeds(
        total_bytes=total,
        weight_bytes=weights,
        activation_bytes_per_token=cdiv(peak, config.max_num_tokens),
        kv_bytes_per_block=per_block,
        tokens_per_block=config.tokens_per_block,
        fixed_bytes=fixed,
        other_bytes=in_use,
        device=torch.cuda.get_device_name(),
    )
    return plan_memory(needs, _wish(config, per_block, config.args.kv_cache_config.max_tokens))


def _wish(config: ResolvedConfig, kv_bytes_per_block: int, max_kv_tokens: int | None) -> MemoryWish:
    settings = config.args.kv_cache_config
    fraction = settings.free_gpu_memory_fraction
    explicit = config.args.max_seq_len
    smaller = {}
    if BYTES["bfloat16"] < BYTES[config.kv_dtype]:
        smaller["bfloat16"] = kv_bytes_per_block * BYTES["bfloat16"] // BYTES[config.kv_dtype]
    return MemoryWish(
        max_seq_len=None if explicit == "auto" else explicit,
        model_max_seq_len=config.max_seq_len,
        max_num_tokens=config.max_num_tokens,
        min_num_tokens=config.max_batch_size,
        free_memory_fraction=None if fraction == "auto" else fraction,
        max_kv_tokens=max_kv_tokens,
        kv_dtype=config.kv_dtype,
        kv_bytes_per_block_by_dtype=smaller,
    )
