# SPDX-License-Identifier: Apache-2.0
"""What one layer's KV cache is, and which layers share a group of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.config.dtype import kv_head_bytes


@dataclass(frozen=True, slots=True)
class KvSpec:
    """One layer's cache: a key and a value per token and KV head. Layers with equal specs can share blocks."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens a query sees, itself included; None sees all."""
    dtype: str = "bfloat16"
    """float32, bfloat16, float16, fp8 or int8."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.num_kv_heads * kv_head_bytes(self.dtype, self.head_dim)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV lies in the same blocks: a block holds `tokens_per_block` tokens of every layer of its group."""

    spec: KvSpec
    """What its blocks must keep: `window` is set only where every layer of the group has that window."""
    layers: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V over the layers of the group."""
        return self.spec.bytes_per_token * len(self.layers)

    def bytes_per_block(self, tokens_per_block: int) -> int:
        """Bytes of one block: [num_layers, 2, num_kv_heads, tokens_per_block, head_dim], int8's scales included."""
        return self.bytes_per_token * tokens_per_block


def group_layers(specs: Sequence[KvSpec], *, split_windows: bool = False) -> list[KvGroup]:
    """Layers by equal (heads, head_dim, dtype), in order of each group's first layer.

    Without `split_windows` a sliding layer keeps its whole past in the group of the full layers, and its window only
    masks. With it a window is part of what must be equal, so that a windowed group can drop what it no longer sees.
    """
    members: dict[KvSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec if split_windows else replace(spec, window=None), []).append(layer)
    return [KvGroup(spec, tuple(layers)) for spec, layers in members.items()]


def group_of_layers(groups: Sequence[KvGroup]) -> list[int]:
    """The group index of each layer."""
    index = {layer: group for group, members in enumerate(groups) for layer in members.layers}
    return [index[layer] for layer in range(len(index))]
