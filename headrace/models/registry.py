# SPDX-License-Identifier: Apache-2.0
"""Architecture -> model class. Nothing is imported before it is asked for."""

import importlib

from headrace.config.model import ModelConfig
from headrace.errors import ModelLoadError
from headrace.layers.build import BuildContext
from headrace.models.base import CausalLM
from headrace.utils.spelling import nearest

MODELS: dict[str, str] = {
    "Gemma3ForCausalLM": "headrace.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "headrace.models.gemma3:Gemma3ForCausalLM",
    "LlamaForCausalLM": "headrace.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "headrace.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "headrace.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "headrace.models.qwen3:Qwen3ForCausalLM",
    "SmolLM3ForCausalLM": "headrace.models.smollm3:SmolLM3ForCausalLM",
}
"""The `architectures` entry of a checkpoint's config.json -> "module:Class"."""


def find_model(architecture: str) -> type[CausalLM]:
    """The class of an architecture; ModelLoadError if there is none."""
    if architecture not in MODELS:
        near = nearest(architecture, MODELS)
        hint = f"; the nearest is {near}" if near else ""
        raise ModelLoadError(
            f"Architecture {architecture} is not built{hint} (built: {', '.join(MODELS)}). "
            "CONTRIBUTING.md says how to add one."
        )
    module, name = MODELS[architecture].split(":")
    found: type[CausalLM] = vars(importlib.import_module(module))[name]
    return found


def build_model(cfg: ModelConfig, ctx: BuildContext) -> CausalLM:
    """The model with uninitialised weights on the context's device; `models/weights.py` fills them."""
    return find_model(cfg.architecture)(ctx, cfg).eval()
