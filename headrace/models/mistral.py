# SPDX-License-Identifier: Apache-2.0
"""Mistral: Llama with a sliding window on every layer, which `ModelConfig.layer_windows` already says."""

from headrace.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
