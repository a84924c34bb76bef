# SPDX-License-Identifier: Apache-2.0
"""What a model and its settings will take of a device, by arithmetic alone: no torch, no device, no weights."""

from headrace.config.dtype import BYTES
from headrace.config.model import ModelConfig
from headrace.config.resolve import ResolvedConfig
from headrace.core.ledger import GIB, MemoryNeeds
from headrace.core.padded_sizes import graph_sizes
from headrace.utils.math import cdiv

MATMUL_WORKSPACE_BYTES = 32 << 20
"""What the matrix library keeps on a GPU from its first product on; 8 MiB before compute capability 9.0."""
SAMPLER_PIECE_BYTES = 256 << 20
"""fp32 logits that the sampler edits at a time: rows that want more than an argmax are sampled in pieces of this."""
SAMPLER_COPIES = 3
"""Tables of that size that are live at once: the logits, their raw values for log-probabilities, one being made."""
GRAPH_BYTES_PER_LAYER = 120 << 10
"""What the driver keeps of one layer of one captured body. On an H200 the 87 graphs of an 8B model, of which 39 are
bodies of 36 layers, take 0.27 GiB, some 0.1 of it their shared memory."""
ROW_WORDS = 16 + 256 + 2 * 1024
"""int32 words of a request row beside its tokens and blocks: its record, its banned tokens, its logit_bias."""
UPLOAD_BYTES = 4 << 20
"""The device's end of what a step sends."""
DEVICE_BYTES_BEFORE = GIB // 2
"""Of a GPU that nobody uses, taken by the driver for its own and for our process."""
ATTENTION_COPY_BYTES = 16 << 20
"""Of each layer on a CPU, for copies of rows that lie in one piece."""


def estimate_needs(
    config: ResolvedConfig,
    total_bytes: int,
    *,
    other_bytes: int = DEVICE_BYTES_BEFORE,
    packed_bytes: int | None = None,
    device: str = "the device",
) -> MemoryNeeds:
    """What the ledger is told of a start that has not happened.

    Args:
        total_bytes: of the device.
        other_bytes: in use before the start.
        packed_bytes: of weights that stay packed; None: they are stored in the config's dtype.
        device: its name.
    """
    return MemoryNeeds(
        total_bytes=total_bytes,
        weight_bytes=weight_bytes(config, packed_bytes),
        activation_bytes_per_token=cdiv(activation_bytes(config), config.max_num_tokens),
        kv_bytes_per_block=config.model.kv_bytes_per_token(config.kv_dtype) * config.tokens_per_block,
        tokens_per_block=config.tokens_per_block,
        fixed_bytes=workspace_bytes(config),
        graph_bytes=graph_bytes(config),
        other_bytes=other_bytes,
        device=device,
    )


def weight_bytes(config: ResolvedConfig, packed_bytes: int | None = None) -> int:
    """Weights, and the tables of the rotary embedding."""
    model, size = config.model, BYTES[config.dtype]
    q, kv = _head_widths(model)
    small = 2 * model.hidden_size + model.attention_bias * (q + 2 * kv) + model.attention_out_bias * model.hidden_size
    small += model.mlp_bias * (2 * model.intermediate_size + model.hidden_size)
    stored = (model.num_params() + model.num_layers * small + model.hidden_size) * size
    ropes = {model.rope, model.rope_local} - {None}
    tables = sum(rope.rotary_dim(model.head_dim) for rope in ropes if rope is not None) * config.max_seq_len * 4
    return (stored if packed_bytes is None else packed_bytes) + tables


def activation_bytes(config: ResolvedConfig) -> int:
    """Peak of the largest step: `max_num_tokens` through a layer, or `max_batch_size` rows through the sampler."""
    rows = min(config.max_batch_size, config.max_num_tokens)
    body = _body_bytes(config, config.max_num_tokens)
    if config.device == "cuda":
        body += MATMUL_WORKSPACE_BYTES
    logits = rows * config.model.vocab_size
    sampler = logits * BYTES[config.dtype] + SAMPLER_COPIES * min(4 * logits, SAMPLER_PIECE_BYTES)
    return max(body, sampler)


def graph_bytes(config: ResolvedConfig) -> int:
    """CUDA graphs: the memory that all share, as much as the largest needs, and what the driver keeps of each."""
    sizes = graph_sizes(config)
    if sizes is None:
        return 0
    bodies = sizes.body_sizes()
    shared = _body_bytes(config, max((size.num_tokens for size in bodies), default=0))
    head = max(sizes.decode, default=0) * config.model.vocab_size * BYTES[config.dtype]
    return max(shared, head) + len(bodies) * config.model.num_layers * GRAPH_BYTES_PER_LAYER


def workspace_bytes(config: ResolvedConfig) -> int:
    """Request rows, the buffers that steps are gathered into, and on a GPU those that padded steps leave results in."""
    model, rows = config.model, config.max_batch_size
    if config.device == "cpu":
        return ATTENTION_COPY_BYTES * model.num_layers
    # One group of layers; a further one has tables of its own, a thousandth of the whole.
    blocks = cdiv(config.max_seq_len, config.tokens_per_block)
    state = rows * 4 * (ROW_WORDS + config.max_seq_len + blocks)
    gathered = config.max_num_tokens * 3 * 8 + rows * blocks * 4
    total = state + gathered + UPLOAD_BYTES
    if graph_sizes(config) is not None:
        total += rows * (model.vocab_size + model.hidden_size) * BYTES[config.dtype]
    return total


def _head_widths(model: ModelConfig) -> tuple[int, int]:
    """Numbers of a token's queries, and of its keys."""
    return model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim


def _body_bytes(config: ResolvedConfig, num_tokens: int) -> int:
    """Peak of a layer: its input, the residual and what the layer before left; beside them the gated block's two
    products and their result, or q, k and v with the rotated q and what was attended."""
    model = config.model
    q, kv = _head_widths(model)
    widest = max(3 * model.intermediate_size, 3 * q + 2 * kv)
    return num_tokens * (3 * model.hidden_size + widest) * BYTES[config.dtype]
