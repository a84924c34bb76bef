# SPDX-License-Identifier: Apache-2.0
"""What one layer's KV cache is, and which layers share a group of blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.config.dtype import kv_head_bytes
from headrace.utils.math import cdiv, round_up


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
    """What its blocks must keep; without a window, the whole past."""
    layers: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V over the layers of the group."""
        return self.spec.bytes_per_token * len(self.layers)

    def bytes_per_block(self, tokens_per_block: int) -> int:
        """Bytes of one block: [num_layers, 2, num_kv_heads, tokens_per_block, head_dim], int8's scales included."""
        return self.bytes_per_token * tokens_per_block


def group_layers(specs: Sequence[KvSpec]) -> list[KvGroup]:
    """Layers by equal (heads, head_dim, window, dtype), in order of each group's first layer.

    A windowed group keeps of each sequence what its window sees, and a group of the other layers keeps all. Where
    every layer has a window there is nothing to save it for: a block then stays as long as its sequence.
    """
    splits = any(spec.window is None for spec in specs)
    members: dict[KvSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec if splits else replace(spec, window=None), []).append(layer)
    return [KvGroup(spec, tuple(layers)) for spec, layers in members.items()]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How one group lies in the arena."""

    blocks_per_slab: int
    window: int | None = None
    """As `KvSpec.window`: what a sequence keeps of this group."""
    block_stride: int = 1
    """Bytes from one block to the next: what a block takes, and a little where slabs do not divide evenly."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One arena of equal slabs, of which each group takes as many as it needs."""

    num_slabs: int
    groups: tuple[GroupLayout, ...]

    @classmethod
    def plain(cls, num_blocks: int) -> "CacheLayout":
        """One group with `num_blocks` blocks."""
        return cls(1, (GroupLayout(num_blocks),))

    @property
    def slab_bytes(self) -> int:
        return self.groups[0].blocks_per_slab * self.groups[0].block_stride

    @property
    def bytes_per_position(self) -> int:
        """Bytes of a block in every group together."""
        return sum(group.block_stride for group in self.groups)

    @property
    def num_blocks(self) -> int:
        """Blocks of every group together that the arena holds."""
        return self.num_slabs * self.slab_bytes // self.bytes_per_position


MAX_SLAB_WASTE = 0.02
"""Share of a slab that may be left over between blocks, for the sake of small slabs."""
MAX_BLOCKS_PER_SLAB = 64
"""Of the largest kind."""


def lay_out(groups: Sequence[KvGroup], tokens_per_block: int, num_blocks: int) -> CacheLayout:
    """An arena with room for `num_blocks` blocks of every group, in slabs that each hold whole blocks of any group.

    A slab is the smallest multiple of the largest block that every group fills to within `MAX_SLAB_WASTE`. Blocks of a
    group begin at even distances throughout, multiples of a head's part of a block.
    """
    sizes = [group.bytes_per_block(tokens_per_block) for group in groups]
    if len(groups) == 1:
        return CacheLayout(1, (GroupLayout(num_blocks, groups[0].spec.window, sizes[0]),))
    units = [
        size // (2 * group.spec.num_kv_heads * len(group.layers)) for size, group in zip(sizes, groups, strict=True)
    ]
    best: tuple[float, int, list[int]] = (0.0, 0, [])
    for num_largest in range(1, MAX_BLOCKS_PER_SLAB + 1):
        counts = [max(sizes) * num_largest // size for size in sizes]
        step = math.lcm(*[count * unit for count, unit in zip(counts, units, strict=True)])
        slab = round_up(max(sizes) * num_largest, step)
        share = min(num * size for num, size in zip(counts, sizes, strict=True)) / slab
        best = max(best, (share, slab, counts), key=lambda each: each[0])
        if share >= 1 - MAX_SLAB_WASTE:
            break
    _, slab, counts = best
    layouts = [GroupLayout(num, group.spec.window, slab // num) for num, group in zip(counts, groups, strict=True)]
    return CacheLayout(sum(cdiv(num_blocks, num) for num in counts), tuple(layouts))


def group_of_layers(groups: Sequence[KvGroup]) -> list[int]:
    """The group index of each layer."""
    index = {layer: group for group, members in enumerate(groups) for layer in members.layers}
    return [index[layer] for layer in range(len(index))]
