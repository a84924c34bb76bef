# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and 2.5: Llama with a bias on q, k and v, which `config/hf.py` puts into the config."""

from headrace.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
