# SPDX-License-Identifier: Apache-2.0
"""A model's small files: a config, a byte tokenizer, a chat template. There are no weights."""

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from headrace.engine.detokenizer import LETTER_OF

VOCAB_SIZE = 300
EOS = 257
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no role ' + m['role']) }}{% endif %}"
    "<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "eos_token_id": EOS,
    "bos_token_id": 256,
    "torch_dtype": "float32",
}


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i, for i under 256; then <|start|>, <|end|>, and a token that is not special."""
    backend = Tokenizer(BPE(vocab={LETTER_OF[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|start|>", "<|end|>")]
    backend.add_tokens([*special, AddedToken("<think>", special=False, normalized=False)])
    return backend
