# SPDX-License-Identifier: Apache-2.0
"""The KV cache's memory: one arena per group of layers, and each layer's view of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.core.kv_cache_spec import KvGroup, group_of_layers
from headrace.kernels.kv_quant import layer_view, stored_dtype, tile_size
from headrace.worker.device import lazy_zeros


class KVArenas:
    """Per group `[num_blocks, num_layers, 2, num_kv_heads, tokens_per_block, head_dim]`, the last two flat: a block is
    contiguous over all its layers, and moves in one copy. Of an int8 cache the tokens' scales follow those numbers
    (`kernels/kv_quant.py`). Addresses are fixed from here on.

    Zeroed at first: attention multiplies what lies past a row's length by 0, which NaN would survive.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group_of_layer = group_of_layers(groups)
        self.groups: list[Tensor] = []
        self.layers: list[Tensor] = [torch.empty(0)] * len(self.group_of_layer)
        """Per layer, a view [num_blocks, 2, num_kv_heads, tokens_per_block, head_dim]."""
        for group in groups:
            spec = group.spec
            tile = tile_size(tokens_per_block, spec.head_dim, stored_dtype(dtype))
            shape = (num_blocks, len(group.layers), 2, spec.num_kv_heads, tile)
            arena = lazy_zeros(shape, stored_dtype(dtype), device)
            self.groups.append(arena)
            for index, layer in enumerate(group.layers):
                self.layers[layer] = layer_view(arena, index, tokens_per_block, spec.head_dim)
