# SPDX-License-Identifier: Apache-2.0
"""What a device has and what the parts of a worker take, for the ledger that sizes the KV cache."""

import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from headrace.config.resolve import ResolvedConfig
from headrace.core.kv_cache_spec import KvGroup, lay_out
from headrace.core.ledger import MemoryLedger, MemoryNeeds, MemoryWish, plan_memory
from headrace.core.memory_estimate import activation_bytes, estimate_needs, graph_bytes, workspace_bytes
from headrace.errors import ConfigError
from headrace.utils.machine import available_memory, read_text
from headrace.utils.math import cdiv
from headrace.worker.device import give_back_freed_memory

SMALLER_KV_DTYPES = ("bfloat16", "fp8", "int8")
"""What a cache that does not fit may be kept in instead."""

MODEST_CPU_TOKENS = 65_536
"""KV tokens that a CPU worker takes unasked, if a quarter of the free memory holds them."""
MODEST_CPU_REQUESTS = 4
"""Or this many requests of `max_seq_len`."""
MODEST_CPU_SHARE = 0.25


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


def anonymous_bytes() -> int:
    """Memory of this process that is no file's; 0 where the system does not say."""
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


class MemoryBook:
    """Follows a start: what is there before it, what each part takes, and what was reckoned."""

    def __init__(self, config: ResolvedConfig, device: torch.device, packed_bytes: int | None) -> None:
        """packed_bytes: of weights that stay packed, about; None: they are stored in the config's dtype."""
        self._config = config
        self._device = device
        self._packed_bytes = packed_bytes
        self._is_gpu = device.type == "cuda"
        self._weights = 0
        self._ledger: MemoryLedger | None = None
        self._predicted: MemoryLedger | None = None
        if self._is_gpu:
            free, total = torch.cuda.mem_get_info(device)
            self._before = total - free
        else:
            self._before = anonymous_bytes()

    def weights_loaded(self) -> None:
        """What has been taken since the start are the weights."""
        if self._is_gpu:
            self._weights = torch.cuda.memory_allocated()
        else:
            give_back_freed_memory()
            self._weights = max(0, anonymous_bytes() - self._before)

    def share_host(self, groups: Sequence[KvGroup]) -> MemoryLedger:
        """A modest part of a CPU's memory: untouched blocks cost nothing, but a full cache would stay full.

        It always holds one request of `max_seq_len`; a share or a number of tokens that the user asks for is kept.
        """
        config, free = self._config, available_memory()
        per_block = bytes_per_block(config, groups)
        settings = config.args.kv_cache_config
        tokens = settings.max_tokens
        if tokens is None and settings.free_gpu_memory_fraction == "auto":
            share = int(free * MODEST_CPU_SHARE) // per_block * config.tokens_per_block
            modest = max(MODEST_CPU_TOKENS, MODEST_CPU_REQUESTS * config.max_seq_len)
            tokens = max(min(modest, share), config.max_seq_len)
        needs = MemoryNeeds(
            total_bytes=free + self._weights,
            weight_bytes=self._weights,
            activation_bytes_per_token=cdiv(activation_bytes(config), config.max_num_tokens),
            kv_bytes_per_block=per_block,
            tokens_per_block=config.tokens_per_block,
            **_window_needs(config, groups),
            fixed_bytes=workspace_bytes(config),
            device="the host (free before the start)",
        )
        return self._share(needs, _wish(config, groups, tokens))

    def share_gpu(self, groups: Sequence[KvGroup], fixed: int, peak: int, has_graphs: bool) -> MemoryLedger:
        """All of a GPU but what was measured, the graphs and the reserve.

        In bytes: of the rows and buffers, and the peak of the largest step, whose memory has been given back.
        """
        config = self._config
        free, total = torch.cuda.mem_get_info()
        per_block = bytes_per_block(config, groups)
        needs = MemoryNeeds(
            total_bytes=total,
            weight_bytes=self._weights,
            activation_bytes_per_token=cdiv(peak, config.max_num_tokens),
            kv_bytes_per_block=per_block,
            tokens_per_block=config.tokens_per_block,
            **_window_needs(config, groups),
            fixed_bytes=fixed,
            graph_bytes=graph_bytes(config) if has_graphs else 0,
            # Past what torch knows of: others', and what the driver and the libraries have loaded by now.
            other_bytes=max(self._before, total - free - torch.cuda.memory_reserved()),
            device=torch.cuda.get_device_name(),
        )
        return self._share(needs, _wish(config, groups, config.args.kv_cache_config.max_tokens))

    def lines(self, graphs: int, num_left: int) -> list[str]:
        """The ledger, predicted beside measured. graphs: bytes of those captured; num_left: graphs still to capture."""
        assert self._ledger is not None, "the memory is shared out first"
        ledger, unmeasured = self._ledger, {"activations", "graphs", "workspaces"}
        if self._is_gpu:
            unmeasured = {"graphs"} if num_left else set()
            planned = ledger.needs.graph_bytes
            shown = planned if num_left else graphs
            needs = replace(ledger.needs, graph_bytes=shown)
            ledger = replace(ledger, needs=needs, left_bytes=ledger.left_bytes + planned - shown)
        return ledger.lines(self._predicted, unmeasured)

    def _share(self, needs: MemoryNeeds, wish: MemoryWish) -> MemoryLedger:
        self._ledger = plan_memory(needs, wish)
        reckoned = estimate_needs(
            self._config,
            needs.total_bytes,
            other_bytes=needs.other_bytes,
            packed_bytes=self._packed_bytes,
            device=needs.device,
        )
        try:
            self._predicted = plan_memory(reckoned, wish)
        except ConfigError:
            # It would not have been let in, and it fits: no prediction is shown.
            self._predicted = None
        return self._ledger


def _wish(config: ResolvedConfig, groups: Sequence[KvGroup], max_kv_tokens: int | None) -> MemoryWish:
    settings = config.args.kv_cache_config
    fraction = settings.free_gpu_memory_fraction
    explicit = config.args.max_seq_len
    by_dtype = {dtype: bytes_per_block(config, groups, dtype) for dtype in SMALLER_KV_DTYPES}
    taken = bytes_per_block(config, groups)
    return MemoryWish(
        max_seq_len=None if explicit == "auto" else explicit,
        model_max_seq_len=config.max_seq_len,
        max_num_tokens=config.max_num_tokens,
        min_num_tokens=config.max_batch_size,
        free_memory_fraction=None if fraction == "auto" else fraction,
        max_kv_tokens=max_kv_tokens,
        kv_dtype=config.kv_dtype,
        kv_bytes_per_block_by_dtype={dtype: size for dtype, size in by_dtype.items() if size < taken},
    )


def bytes_per_block(config: ResolvedConfig, groups: Sequence[KvGroup], dtype: str | None = None) -> int:
    """Of a block of every group, as they lie in the arena; dtype: were it another."""
    if dtype is not None:
        groups = [replace(group, spec=replace(group.spec, dtype=dtype)) for group in groups]
    return lay_out(groups, config.tokens_per_block, 1).bytes_per_position


def _window_needs(config: ResolvedConfig, groups: Sequence[KvGroup]) -> dict[str, int]:
    """What groups with a window keep of a request, for `MemoryNeeds`."""
    layout = lay_out(groups, config.tokens_per_block, 1)
    windows = [(group.window, group.block_stride) for group in layout.groups if group.window is not None]
    if not windows:
        return {}
    longest = max(window for window, _ in windows) + config.max_num_tokens * config.num_plans_in_flight
    return {
        "window_bytes_per_block": sum(stride for _, stride in windows),
        "max_window_blocks": cdiv(longest, config.tokens_per_block) + 2,
        "slack_bytes": layout.slab_bytes * len(layout.groups),
    }
