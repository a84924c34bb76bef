# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (dense): Llama with an RMSNorm on each q and k head."""

from dataclasses import replace

from headrace.config.model import ModelConfig
from headrace.layers.attention import AttentionOptions
from headrace.models.base import CausalLM
from headrace.models.llama import LlamaLayer


class Qwen3Layer(LlamaLayer):
    def attention_options(self, cfg: ModelConfig, index: int) -> AttentionOptions:
        return replace(super().attention_options(cfg, index), qk_norm_eps=cfg.rms_norm_eps)


class Qwen3ForCausalLM(CausalLM):
    layer_cls = Qwen3Layer
