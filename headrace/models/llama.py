# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3, SmolLM2, and whatever has their shape: the neighbour other models are described against."""

from torch import Tensor

from headrace.config.model import ModelConfig
from headrace.layers.attention import Attention, AttentionOptions
from headrace.layers.build import BuildContext, ForwardContext
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.models.base import CausalLM, DecoderLayer


class LlamaLayer(DecoderLayer):
    """Norm, attention, norm, gated MLP; each norm takes in the addition before it."""

    def __init__(self, ctx: BuildContext, cfg: ModelConfig, index: int) -> None:
        super().__init__(ctx, cfg, index)
        self.options = self.attention_options(cfg, index)
        self.self_attn = Attention(ctx.sub("self_attn"), self.options)
        self.mlp = GatedMLP(ctx.sub("mlp"), cfg.hidden_size, cfg.intermediate_size, cfg.hidden_act, cfg.mlp_bias)
        self.build_norms(ctx, cfg)

    def attention_options(self, cfg: ModelConfig, index: int) -> AttentionOptions:
        """The attention of layer `index`; a model that differs replaces fields of it."""
        return AttentionOptions(
            layer=index,
            hidden_size=cfg.hidden_size,
            num_q_heads=cfg.num_q_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            scale=cfg.attention_scale,
            rope=cfg.rope if cfg.layer_uses_rope[index] else None,
            window=cfg.layer_windows[index],
            softcap=cfg.attn_softcap,
            qkv_bias=cfg.attention_bias,
            out_bias=cfg.attention_out_bias,
        )

    def build_norms(self, ctx: BuildContext, cfg: ModelConfig) -> None:
        """The norms, and the calls that `forward` makes, bound once."""
        self.input_layernorm = RMSNorm(ctx.sub("input_layernorm"), cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(ctx.sub("post_attention_layernorm"), cfg.hidden_size, cfg.rms_norm_eps)
        self._first_norm = self.input_layernorm.forward
        self._attn_norm = self.input_layernorm.add_forward
        self._attn = self.self_attn.forward
        self._mlp_norm = self.post_attention_layernorm.add_forward
        self._mlp = self.mlp.forward

    def forward(self, x: Tensor, residual: Tensor | None, fwd: ForwardContext) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self._first_norm(x), x
        else:
            x, residual = self._attn_norm(x, residual)
        x, residual = self._mlp_norm(self._attn(x, fwd), residual)
        return self._mlp(x), residual


class LlamaForCausalLM(CausalLM):
    layer_cls = LlamaLayer
