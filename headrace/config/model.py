# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: a checkpoint's facts under our names; `from_hf` is the only reader of Hugging Face json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.config.dtype import kv_head_bytes
from headrace.config.hf import read_hf
from headrace.config.rope import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """What a causal language model is made of. Plain data, without torch; every default is fixed here."""

    architecture: str
    """Class name in the checkpoint, such as LlamaForCausalLM."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str
    rope: RopeConfig
    rope_local: RopeConfig | None = None
    """Rotary embedding of the layers with a window, where it differs (Gemma 3)."""
    layer_uses_rope: tuple[bool, ...] = ()
    """Per layer: whether positions are rotated (SmolLM3 leaves some out)."""
    layer_windows: tuple[int | None, ...] = ()
    """Per layer: tokens a query sees, itself included; None sees all."""
    attention_bias: bool = False
    """Bias on q, k and v."""
    attention_out_bias: bool = False
    """Bias on the attention output."""
    mlp_bias: bool = False
    attn_softcap: float | None = None
    final_logit_softcap: float | None = None
    query_pre_attn_scalar: float | None = None
    """Attention scale is this ** -0.5; None: head_dim ** -0.5."""
    embedding_multiplier: float | None = None
    """Token embeddings are multiplied by it, rounded to the model's dtype first; None: by nothing."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    torch_dtype: str | None = None
    """The checkpoint's own dtype: float32, bfloat16 or float16; None: not said."""
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    """The checkpoint's quantization_config, as it stands."""
    kv_dtype: str | None = None
    """How the checkpoint asks its KV cache to be kept: fp8, int8, or a name that is not built; None: not said."""
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Every json value without a field of its own, for architectures that need it."""

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by."""
        return 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    @property
    def max_model_len(self) -> int:
        """Longest sequence the model is made for: what `max_seq_len: auto` starts from."""
        if self.rope.kind == "yarn" and self.rope.original_max_position_embeddings:
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @property
    def longest_allowed(self) -> int:
        """Longest sequence that may be asked for: over `max_model_len` where the RoPE scaling stretches freely."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_model_len * self.rope.factor)
        return self.max_model_len

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * kv_head_bytes(kv_dtype, self.head_dim)

    def num_params(self) -> int:
        """Weights of the model, biases and norms left out."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_q_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp) + tables

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelConfig":
        """The config of an HF `config.json` (v4 or v5 spelling); its eos ids and generation_config's together.

        Takes any architecture that is spelled the common way; which ones have code is the registry's knowledge. Raises
        ModelLoadError for a value that is missing or impossible.
        """
        return cls(**read_hf(hf, generation_config or {}))
