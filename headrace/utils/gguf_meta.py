# SPDX-License-Identifier: Apache-2.0
"""What a .gguf file says about its model, in a Hugging Face config's words, and its tokenizer. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ModelLoadError
from headrace.utils.gguf_file import GgufFile, read_gguf

# GGUF architecture -> (Hugging Face architecture, model type).
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
# Tokens that end a turn although a file's eos id may be another one.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
CONTROL = 3


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer stored in a file, as its keys give it."""

    model: str
    """"gpt2": byte-level BPE; "llama": SentencePiece with byte fallback."""
    pre: str
    """Name of the rule that splits text before BPE ("smollm", "llama-bpe", "qwen2", "default")."""
    tokens: list[str]
    token_types: list[int]
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    scores: list[float]
    merges: list[str]
    """"a b", best first; empty where `scores` rule."""
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    eot_token_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class GgufMeta:
    """A file's model as a Hugging Face config (for `ModelConfig.from_hf`), and its tokenizer."""

    path: Path
    architecture: str
    config: dict[str, Any]
    tokenizer: GgufTokenizer


def read_gguf_meta(path: Path) -> GgufMeta:
    """Read a file's header. Raises ModelLoadError for an unknown architecture or a broken file."""
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(f"{path} holds a model of the unknown architecture {name!r}; from GGUF there are: {known}")
    if "tokenizer.ggml.tokens" not in file.metadata:
        raise ModelLoadError(f"{path} holds no tokenizer (no key tokenizer.ggml.tokens)")
    tokenizer = _tokenizer(file.metadata)
    return GgufMeta(path, name, _Keys(file, name).config(tokenizer), tokenizer)


class _Keys:
    """The keys of one architecture, and the config they make."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelLoadError(f"{self.file.path} lacks the key {self.architecture}.{key}")
        return value

    def config(self, tokenizer: GgufTokenizer) -> dict[str, Any]:
        hf_name, model_type = ARCHITECTURES[self.architecture]
        tensors = self.file.tensors
        if "token_embd.weight" not in tensors:
            raise ModelLoadError(f"{self.file.path} lacks the tensor token_embd.weight")
        heads = self.need("attention.head_count")
        config = {
            "architectures": [hf_name],
            "model_type": model_type,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": self.need("embedding_length"),
            "intermediate_size": self.need("feed_forward_length"),
            "num_hidden_layers": self.need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("attention.head_count_kv", heads),
            "head_dim": self.get("attention.key_length", self.need("embedding_length") // heads),
            "rms_norm_eps": self.need("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.need("context_length"),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "rope_theta": self.get("rope.freq_base", 10000.0),
            "rope_scaling": self.rope_scaling(),
            "sliding_window": self.get("attention.sliding_window"),
            "torch_dtype": {"F32": "float32", "F16": "float16"}.get(self.main_kind(), "bfloat16"),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": _eos_ids(tokenizer, self.architecture),
            "pad_token_id": tokenizer.pad_token_id,
        }
        if self.main_kind() not in ("F32", "F16", "BF16"):
            config["quantization_config"] = {"quant_method": "gguf"}
        if self.architecture == "gemma3":
            config |= self.gemma3(config)
        if self.architecture == "smollm3":
            # Every fourth layer has no rotary embedding; the files do not say so.
            config["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
        return config

    def gemma3(self, config: dict[str, Any]) -> dict[str, Any]:
        """Every sixth layer sees everything, with its own RoPE; the 27B model alone scales queries by its width."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        layers = config["num_hidden_layers"]
        period = self.get("attention.sliding_window_pattern", 6)
        if isinstance(period, list):
            types = ["sliding_attention" if slides else "full_attention" for slides in period]
        else:
            types = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "rope_local_base_freq": self.get("rope.freq_base_swa", 10000.0),
            "layer_types": types,
            "query_pre_attn_scalar": hidden // heads if layers == 62 else config["head_dim"],
            "final_logit_softcapping": self.get("final_logit_softcapping"),
            "attn_logit_softcapping": self.get("attn_logit_softcapping"),
        }

    def main_kind(self) -> str:
        """The type of the first layer's query projection, which stands for the file's."""
        tensor = self.file.tensors.get("blk.0.attn_q.weight")
        return "" if tensor is None else tensor.kind

    def rope_scaling(self) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self.file.tensors:
            return self.rope_from_factors()
        kind = self.get("rope.scaling.type", "none")
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear", 1.0))
        if kind == "none" or not factor:
            return None
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = self.get("rope.scaling.original_context_length", self.need("context_length"))
            scaling["original_max_position_embeddings"] = original
        return scaling

    def rope_from_factors(self) -> dict[str, Any]:
        """RoPE from the stored divisor of each frequency: Llama 3's rule where it gives these, else the divisors."""
        stored = self.file.read(self.file.tensors["rope_freqs.weight"]).reshape(-1).view("<f4").astype(np.float64)
        factor, original = float(stored.max()), 8192
        scaling: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": original}
        theta = float(self.get("rope.freq_base", 10000.0))
        if np.allclose(_llama3_divisors(theta, len(stored), factor, original), stored, rtol=1e-4):
            return scaling | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        divisors = stored.tolist()
        scaling |= {"rope_type": "longrope", "attention_factor": 1.0}
        return scaling | {"short_factor": divisors, "long_factor": divisors}


def _llama3_divisors(theta: float, count: int, factor: float, original: int) -> np.ndarray[Any, Any]:
    """Llama 3's scaling with low 1 and high 4: what each of `count` frequencies is divided by."""
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    smooth = np.clip((original / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _tokenizer(keys: dict[str, Any]) -> GgufTokenizer:
    def get(name: str, default: Any = None) -> Any:
        return keys.get(f"tokenizer.ggml.{name}", default)

    tokens = get("tokens")
    sentencepiece = get("model") == "llama"
    return GgufTokenizer(
        model=get("model", "gpt2"),
        pre=get("pre", "default"),
        tokens=tokens,
        token_types=get("token_type") or [1] * len(tokens),
        scores=get("scores", []),
        merges=get("merges", []),
        bos_token_id=get("bos_token_id"),
        eos_token_id=get("eos_token_id"),
        pad_token_id=get("padding_token_id"),
        unk_token_id=get("unknown_token_id"),
        eot_token_id=get("eot_token_id"),
        add_bos=get("add_bos_token", sentencepiece),
        add_eos=get("add_eos_token", False),
        add_space_prefix=get("add_space_prefix", sentencepiece),
        chat_template=keys.get("tokenizer.chat_template"),
    )


def _eos_ids(tokenizer: GgufTokenizer, architecture: str) -> int | list[int] | None:
    """The eos id, and the ids that end a turn."""
    endings = (*END_OF_TURN, "<|endoftext|>") if architecture.startswith("qwen") else END_OF_TURN
    ids = [i for i in (tokenizer.eos_token_id, tokenizer.eot_token_id) if i is not None]
    ids += [i for i, token in enumerate(tokenizer.tokens) if token in endings and tokenizer.token_types[i] == CONTROL]
    unique = list(dict.fromkeys(ids))
    return unique[0] if len(unique) == 1 else unique or None
