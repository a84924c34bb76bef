# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, text: Llama with norms after each block too, head norms, and a RoPE of their own for the sliding layers.

Norm weights are stored as their distance from 1; the embedding multiplier and the attention scale are in the config.
"""

from dataclasses import replace

from torch import Tensor

from headrace.config.model import ModelConfig
from headrace.layers.attention import AttentionOptions
from headrace.layers.build import BuildContext, ForwardContext
from headrace.layers.norm import RMSNorm
from headrace.models.base import CausalLM, WeightMap
from headrace.models.llama import LlamaLayer


class Gemma3Layer(LlamaLayer):
    def attention_options(self, cfg: ModelConfig, index: int) -> AttentionOptions:
        return replace(
            super().attention_options(cfg, index),
            rope=cfg.rope if cfg.layer_windows[index] is None else cfg.rope_local,
            qk_norm_eps=cfg.rms_norm_eps,
            qk_norm_offset=1.0,
        )

    def build_norms(self, ctx: BuildContext, cfg: ModelConfig) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(ctx.sub(name), cfg.hidden_size, cfg.rms_norm_eps, offset=1.0)

        self.input_layernorm = norm("input_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self._first_norm = self.input_layernorm.forward
        self._attn_norm = self.input_layernorm.add_forward
        self._attn = self.self_attn.forward
        self._attn_out_norm = self.post_attention_layernorm.forward
        self._mlp_norm = self.pre_feedforward_layernorm.add_forward
        self._mlp = self.mlp.forward
        self._mlp_out_norm = self.post_feedforward_layernorm.forward

    def forward(self, x: Tensor, residual: Tensor | None, fwd: ForwardContext) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self._first_norm(x), x
        else:
            x, residual = self._attn_norm(x, residual)
        x, residual = self._mlp_norm(self._attn_out_norm(self._attn(x, fwd)), residual)
        return self._mlp_out_norm(self._mlp(x)), residual


class Gemma3ForCausalLM(CausalLM):
    layer_cls = Gemma3Layer
    norm_offset = 1.0
    # Checkpoints with vision keep the text model under a name that changed once; their towers are not read.
    weight_map = WeightMap(
        renames=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head", "lm_head"),
        ),
        ignored=("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."),
    )
