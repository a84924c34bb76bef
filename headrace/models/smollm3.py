# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: Llama with no rotation on every fourth layer, which `ModelConfig.layer_uses_rope` already says."""

from headrace.models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    pass
