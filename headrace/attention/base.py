# SPDX-License-Identifier: Apache-2.0
"""What every attention backend is given, what it can do, and how it is called."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""The names settings use. The last two are of a KV cache only (`kernels/kv_quant.py`)."""


@dataclass(frozen=True, slots=True)
class LongChunk:
    """A prefill chunk that attends by itself where its layer can (`attention/long_chunk.py`); host numbers, exact."""

    row: int
    first_token: int
    """Among the step's."""
    num_new: int
    length: int
    """KV length, the new tokens included."""


@dataclass(slots=True)
class AttentionMetadata:
    """Where each token of a step stands. One per step; tensors lie on the device, the ints are host-side ceilings.

    Rows of one token come first (`num_decode_rows` of them), then prefill chunks. In a padded step, whose numbers are
    ceilings, only the device knows which row is which: every row from `first_prefill_row` on may be a chunk, and every
    one before `num_decode_rows` may have one token. Padding rows have no token and length 0.
    """

    num_tokens: int
    num_rows: int
    num_decode_rows: int
    first_prefill_row: int
    max_query_len: int
    max_seq_len: int
    """At least the largest of `seq_lens`."""
    query_start_loc: Tensor
    """int32 [num_rows + 1]: exclusive prefix sum of the rows' token counts."""
    seq_lens: Tensor
    """int32 [num_rows]: KV length of each row, this step's tokens included."""
    positions: Tensor
    """int64 [num_tokens]."""
    block_tables: tuple[Tensor, ...]
    """One int32 [num_rows, max_blocks] per KV group."""
    slot_mapping: tuple[Tensor, ...]
    """One int64 [num_tokens] per KV group: block id * tokens_per_block + offset of each new token's KV."""
    long_chunks: tuple[LongChunk, ...] = ()
    """In the order of their rows; never in a padded step."""
    plans: dict[Any, Any] = field(default_factory=dict)
    """What a backend derives from the rest once per step and shares between layers; keyed by backend and shape."""


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What a layer asks of a backend."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Tokens a query sees, itself included; None sees all."""
    softcap: float | None = None
    dtype: str = "bfloat16"
    """Of what `forward` returns: the model's."""
    kv_dtype: str = "bfloat16"
    tokens_per_block: int = 32


@dataclass(frozen=True, slots=True)
class AttentionCapability:
    """What a backend can do; compared with a need by `choose.py`."""

    paged: bool
    cached_prefix: bool
    capturable: bool
    needs_host_lengths: bool
    """It reads lengths on the host: on a GPU it waits for them."""
    device_types: tuple[str, ...]
    min_compute_capability: tuple[int, int] | None = None
    """Of a GPU; None: any."""
    softcap: bool = True
    window: bool = True
    max_head_dim: int = 256
    reads_unused_slots: bool = False
    """Slots past a row's length in its blocks must hold finite values (it multiplies them by 0)."""
    kv_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "fp8", "int8")


CAPABILITIES = {
    "TRITON": AttentionCapability(
        paged=True,
        cached_prefix=True,
        capturable=True,
        needs_host_lengths=False,
        device_types=("cuda",),
        min_compute_capability=(8, 0),
    ),
    "VANILLA": AttentionCapability(
        paged=True,
        cached_prefix=True,
        capturable=False,
        needs_host_lengths=True,
        device_types=("cpu", "cuda"),
        max_head_dim=4096,
        reads_unused_slots=True,
    ),
}
"""What each backend can do, known without importing it; in AUTO's order of preference."""

ALIKE_CAPABILITIES = {
    "TRITON": CAPABILITIES["TRITON"],
    "VANILLA": replace(CAPABILITIES["VANILLA"], device_types=("cpu",), softcap=False),
}
"""What they can do under `deterministic`."""


class AttentionBackend(Protocol):
    """One layer's attention, bound to that layer's need when the layer is built."""

    name: str
    capability: AttentionCapability

    def __init__(self, need: AttentionNeed) -> None: ...

    def forward(
        self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, group: int, kv_scale: Tensor | None = None
    ) -> Tensor:
        """Causal attention of new tokens over their rows' KV, which already holds the new tokens' own.

        q: [num_tokens, num_q_heads, head_dim]. kv_cache: the layer's view
        [num_blocks, 2, num_kv_heads, tokens_per_block, head_dim] (strided: blocks are contiguous over all layers).
        group: which entry of `metadata.block_tables` is this layer's. kv_scale: fp32 [2, num_kv_heads], what the codes
        of an fp8 cache are multiplied by. Returns [num_tokens, num_q_heads * head_dim] in
        the need's dtype; what it holds for tokens past the last row is undefined.
        """
        ...
