# SPDX-License-Identifier: Apache-2.0
"""TRITON: our kernels, for every GPU from sm_80 on. Decode rows and prefill chunks of one step each take one pass."""

import torch
from torch import Tensor

from headrace.attention.base import CAPABILITIES, DTYPES, AttentionMetadata, AttentionNeed
from headrace.attention.long_chunk import LongPrefill, serves
from headrace.kernels.attention_decode import paged_decode
from headrace.kernels.attention_plan import DecodePlan, num_programs, plan_decode
from headrace.kernels.attention_prefill import paged_prefill
from headrace.kernels.attention_tile import decode_tile, multiplied_size, prefill_tile, shared_memory


class TritonAttention:
    """One layer's attention by Triton kernels. Never waits for the GPU; grids follow host-side counts alone."""

    name = "TRITON"
    capability = CAPABILITIES["TRITON"]

    def __init__(self, need: AttentionNeed, device: torch.device | None = None) -> None:
        self.need = need
        self.dtype = DTYPES[need.dtype]
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kv_dtype = DTYPES[need.kv_dtype]
        element_size = multiplied_size(kv_dtype, self.dtype)
        shared = shared_memory(device)
        self.prefill_tile = prefill_tile(need.head_dim, element_size, shared)
        self.decode_tile = decode_tile(need.head_dim, element_size, need.num_q_heads // need.num_kv_heads, shared)
        self.programs = num_programs(device, self.decode_tile, need.head_dim, element_size)
        self.long = LongPrefill(need, device.type) if serves(need, device) else None
        self.alike = False
        self.plan_key = ("TRITON", need.window, need.num_q_heads, need.num_kv_heads, need.head_dim)

    def decode_plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """The step's plan, made by the first layer of this shape."""
        plan: DecodePlan | None = metadata.plans.get(self.plan_key)
        if plan is None:
            need = self.need
            plan = plan_decode(
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.num_decode_rows,
                need.num_q_heads,
                need.num_kv_heads,
                need.head_dim,
                need.window,
                self.programs,
            )
            metadata.plans[self.plan_key] = plan
        return plan

    def forward(
        self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, group: int, kv_scale: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        need = self.need
        out = torch.empty(q.shape[0], need.num_q_heads * need.head_dim, dtype=self.dtype, device=q.device)
        table = metadata.block_tables[group]
        num_decode_rows = metadata.num_decode_rows
        if num_decode_rows:
            plan = self.decode_plan(metadata)
            window, softcap = need.window, need.softcap
            paged_decode(q, kv_cache, out, plan, table, need.scale, window, softcap, self.decode_tile, kv_scale)
        first_row = metadata.first_prefill_row
        if self.long is not None:
            for chunk in metadata.long_chunks:
                if chunk.row > first_row:
                    self._prefill(q, kv_cache, out, metadata, table, first_row, chunk.row, kv_scale)
                self.long.forward(q, kv_cache, table[chunk.row], chunk, out, kv_scale)
                first_row = chunk.row + 1
        if metadata.num_rows > first_row:
            self._prefill(q, kv_cache, out, metadata, table, first_row, metadata.num_rows, kv_scale)
        return out

    def _prefill(
        self,
        q: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        metadata: AttentionMetadata,
        table: Tensor,
        first_row: int,
        end_row: int,
        kv_scale: Tensor | None,
    ) -> None:
        """Chunks of rows first_row to end_row."""
        need = self.need
        paged_prefill(
            q,
            kv_cache,
            out,
            table,
            metadata.query_start_loc,
            metadata.seq_lens,
            first_row,
            end_row,
            metadata.num_tokens - first_row,
            need.scale,
            need.window,
            need.softcap,
            self.prefill_tile,
            kv_scale,
            self.alike,
        )


class AlikeTritonAttention(TritonAttention):
    """For `deterministic`: every row, of one token or more, by the same kernel, one tile of keys after the other."""

    def __init__(self, need: AttentionNeed, device: torch.device | None = None) -> None:
        super().__init__(need, device)
        self.long, self.alike = None, True

    def forward(
        self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, group: int, kv_scale: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=self.dtype, device=q.device)
        table = metadata.block_tables[group]
        self._prefill(q, kv_cache, out, metadata, table, 0, metadata.num_rows, kv_scale)
        return out
