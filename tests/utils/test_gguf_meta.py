# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import HEAD_DIM, VOCAB, random_weights, write_gguf

from headrace.config.model import ModelConfig
from headrace.errors import ModelLoadError
from headrace.utils.gguf_meta import read_gguf_meta


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "smollm3", "gemma3"])
def test_each_architecture_makes_a_model_config(tmp_path: Path, architecture: str) -> None:
    weights = random_weights(architecture, bias=architecture == "qwen2")
    keys = {"attention.sliding_window": 8} if architecture == "gemma3" else None
    meta = read_gguf_meta(write_gguf(tmp_path / "tiny.gguf", weights, architecture, keys=keys))
    cfg = ModelConfig.from_hf(meta.config)
    assert (cfg.num_layers, cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim) == (2, 4, 2, 16)
    assert (cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size) == (64, 96, VOCAB)
    assert cfg.max_position_embeddings == 256
    assert cfg.tie_word_embeddings
    assert cfg.attention_bias == (architecture == "qwen2")
    assert cfg.eos_token_ids == (2, 3), "the end-of-turn token ends a turn too"
    if architecture == "gemma3":
        assert cfg.layer_windows == (8, 8)
        assert cfg.embedding_multiplier == pytest.approx(8.0)
        assert cfg.rope_local is not None


def test_an_untied_head_and_a_bias_are_seen_in_the_tensors(tmp_path: Path) -> None:
    config = read_gguf_meta(write_gguf(tmp_path / "t.gguf", random_weights(tied=False, bias=True))).config
    assert not config["tie_word_embeddings"]
    assert config["attention_bias"]


def test_the_files_type_is_the_models_dtype(tmp_path: Path) -> None:
    weights = random_weights()
    kinds = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q4_1": "bfloat16"}
    for kind, dtype in kinds.items():
        config = read_gguf_meta(write_gguf(tmp_path / f"{kind}.gguf", weights, kind=kind)).config
        assert config["torch_dtype"] == dtype
        assert ("quantization_config" in config) == (kind == "Q4_1")


def test_the_tokenizer_comes_as_it_is_stored(tmp_path: Path) -> None:
    tokenizer = read_gguf_meta(write_gguf(tmp_path / "t.gguf", random_weights())).tokenizer
    assert (tokenizer.model, tokenizer.pre, len(tokenizer.tokens)) == ("gpt2", "smollm", VOCAB)
    assert tokenizer.merges == ["t 4", "t 5"]
    assert tokenizer.token_types[:5] == [3, 3, 3, 3, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
    assert not tokenizer.add_bos
    assert tokenizer.chat_template == "{{ messages }}"


def llama3_divisors(theta: float, factor: float) -> np.ndarray:
    """Meta's rule, frequency by frequency."""
    out = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / HEAD_DIM)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192 / 1:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def test_stored_rope_divisors_become_llama_3_scaling(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": llama3_divisors(500000.0, 32.0)}
    path = write_gguf(tmp_path / "t.gguf", random_weights(), keys={"rope.freq_base": 500000.0}, extra=extra)
    scaling = read_gguf_meta(path).config["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)
    assert (scaling["low_freq_factor"], scaling["high_freq_factor"]) == (1.0, 4.0)


def test_other_rope_divisors_are_kept_as_they_are(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "t.gguf", random_weights(), extra={"rope_freqs.weight": divisors})
    scaling = read_gguf_meta(path).config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == pytest.approx(divisors.tolist())
    assert scaling["attention_factor"] == 1.0


def test_yarn_is_read(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    scaling = read_gguf_meta(write_gguf(tmp_path / "t.gguf", random_weights(), keys=keys)).config["rope_scaling"]
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", {}, "mamba")
    with pytest.raises(ModelLoadError, match=r"t\.gguf .*'mamba'.*llama"):
        read_gguf_meta(path)


def test_the_demo_is_what_it_should_be(demo_model: str) -> None:
    meta = read_gguf_meta(Path(demo_model))
    cfg = ModelConfig.from_hf(meta.config)
    assert (cfg.num_layers, cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim, cfg.vocab_size) == (30, 9, 3, 64, 49152)
    assert cfg.eos_token_ids == (2,)
    assert (len(meta.tokenizer.tokens), len(meta.tokenizer.merges)) == (49152, 48900)
