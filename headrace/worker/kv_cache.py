# SPDX-License-Identifier: Apache-2.0
"""The KV cache's memory: one arena per group of layers, and each layer's view of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.core.kv_cache_spec import CacheLayout, KvGroup, group_of_layers
from headrace.kernels.kv_quant import layer_view, stored_dtype, tile_size
from headrace.worker.device import lazy_zeros


class KVArenas:
    """Per group `[num_blocks, num_layers, 2, num_kv_heads, tokens_per_block, head_dim]`, the last two flat: a block is
    contiguous over all its layers, and moves in one copy. Of an int8 cache the tokens' scales follow those numbers
    (`kernels/kv_quant.py`). Addresses are fixed from here on.

    All groups share one arena: its slabs go to one group or another (`core/block_pool.py`), and each group's view is
    cut over the whole of it. Zeroed at first: attention multiplies what lies past a row's length by 0, which NaN would
    survive.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        layout: CacheLayout,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group_of_layer = group_of_layers(groups)
        self.groups: list[Tensor] = []
        self.layers: list[Tensor] = [torch.empty(0)] * len(self.group_of_layer)
        """Per layer, a view [num_blocks, 2, num_kv_heads, tokens_per_block, head_dim]."""
        stored = stored_dtype(dtype)
        memory = lazy_zeros((layout.num_slabs * layout.slab_bytes // stored.itemsize,), stored, device)
        for group, lies in zip(groups, layout.groups, strict=True):
            heads = group.spec.num_kv_heads
            tile = tile_size(tokens_per_block, group.spec.head_dim, stored)
            shape = (layout.num_slabs * lies.blocks_per_slab, len(group.layers), 2, heads, tile)
            strides = (lies.block_stride // stored.itemsize, 2 * heads * tile, heads * tile, tile, 1)
            arena = memory.as_strided(shape, strides)
            self.groups.append(arena)
            for index, layer in enumerate(group.layers):
                self.layers[layer] = layer_view(arena, index, tokens_per_block, group.spec.head_dim)
