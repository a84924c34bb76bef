# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over the paged KV cache, with the options that models differ in."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.attention.base import AttentionNeed
from headrace.config.dtype import plain_dtype
from headrace.config.rope import RopeConfig
from headrace.kernels.rope import qk_norm_rope_cache_write
from headrace.layers.build import BuildContext, ForwardContext
from headrace.layers.linear import ColumnLinear, RowLinear
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import rope_table


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer's attention is. `layer` is its index: its KV cache and its group."""

    layer: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """On q.k before the softmax."""
    rope: RopeConfig | None
    """None: no rotation (NoPE layers)."""
    window: int | None = None
    """Tokens a query sees, itself included; None sees all."""
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    """Epsilon of an RMSNorm on each q and k head before the rotation; None has none."""
    qk_norm_offset: float = 0.0
    """1 where the checkpoint stores a norm's weight as its distance from 1."""


class Attention(nn.Module):
    """qkv projection, then one op (head norms, rotation, KV write), the backend, and the output projection."""

    kv_scale: Tensor | None
    """fp32 [2, num_kv_heads], K's and V's: what the codes of an fp8 cache are multiplied by; None: it is another."""

    def __init__(self, ctx: BuildContext, opt: AttentionOptions) -> None:
        super().__init__()
        sizes = [opt.num_q_heads * opt.head_dim, *[opt.num_kv_heads * opt.head_dim] * 2]
        self.qkv_proj = ColumnLinear(ctx.sub("qkv_proj"), opt.hidden_size, sizes, opt.qkv_bias)
        self.o_proj = RowLinear(ctx.sub("o_proj"), sizes[0], opt.hidden_size, opt.out_bias)
        q_weight = k_weight = None
        if opt.qk_norm_eps is not None:
            self.q_norm = RMSNorm(ctx.sub("q_norm"), opt.head_dim, opt.qk_norm_eps, opt.qk_norm_offset)
            self.k_norm = RMSNorm(ctx.sub("k_norm"), opt.head_dim, opt.qk_norm_eps, opt.qk_norm_offset)
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        need = AttentionNeed(
            num_q_heads=opt.num_q_heads,
            num_kv_heads=opt.num_kv_heads,
            head_dim=opt.head_dim,
            scale=opt.scale,
            window=opt.window,
            softcap=opt.softcap,
            dtype=str(ctx.dtype).removeprefix("torch."),
            kv_dtype=plain_dtype(str(ctx.kv_dtype)),
            tokens_per_block=ctx.tokens_per_block,
        )
        kv_scale = None
        if ctx.kv_dtype == torch.float8_e4m3fn:
            kv_scale = torch.ones(2, opt.num_kv_heads, dtype=torch.float32, device=ctx.device)
        self.register_buffer("kv_scale", kv_scale)
        self.options = opt
        self._layer = opt.layer
        self._qkv = self.qkv_proj.forward
        self._write = qk_norm_rope_cache_write.choose(ctx.device.type, ctx.deterministic)
        self._before = (
            q_weight,
            k_weight,
            opt.qk_norm_eps or 0.0,
            opt.rope and rope_table(ctx, opt.rope, opt.head_dim),
        )
        self._after = (opt.num_q_heads, opt.num_kv_heads, opt.head_dim, opt.qk_norm_offset, kv_scale)
        self._kv_scale = kv_scale
        self._attend = ctx.backend(need).forward
        self._out = self.o_proj.forward

    def forward(self, x: Tensor, fwd: ForwardContext) -> Tensor:
        """x: [num_tokens, hidden_size] -> the same shape. Writes the tokens' K and V into the layer's cache."""
        layer = self._layer
        group = fwd.groups[layer]
        kv_cache = fwd.kv_caches[layer]
        metadata = fwd.attention
        q = self._write(
            self._qkv(x), *self._before, fwd.positions, kv_cache, metadata.slot_mapping[group], *self._after
        )
        return self._out(self._attend(q, kv_cache, metadata, group, self._kv_scale))
