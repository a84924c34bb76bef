# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and 2.5: Llama with a bias on q, k and v, whatever the config says."""

from dataclasses import replace

from headrace.config.model import ModelConfig
from headrace.layers.attention import AttentionOptions
from headrace.models.base import CausalLM
from headrace.models.llama import LlamaLayer


class Qwen2Layer(LlamaLayer):
    def attention_options(self, cfg: ModelConfig, index: int) -> AttentionOptions:
        return replace(super().attention_options(cfg, index), qkv_bias=True, out_bias=False)


class Qwen2ForCausalLM(CausalLM):
    layer_cls = Qwen2Layer
