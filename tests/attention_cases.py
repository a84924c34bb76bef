# SPDX-License-Identifier: Apache-2.0
"""One table of cases for every attention backend, and attention written as plainly as can be."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.attention.base import DTYPES, AttentionMetadata, AttentionNeed
from headrace.kernels.kv_quant import layer_view, tile_size, token_scales
from headrace.kernels.rope import write_cache


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Rows as (cached tokens, new tokens); those of one new token come first, a row (0, 0) is padding."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    tokens_per_block: int = 16
    window: int | None = None
    softcap: float | None = None
    extra_tokens: int = 0
    """Padding tokens after the last row."""
    num_layers: int = 2

    def need(self, dtype: str, kv_dtype: str | None = None) -> AttentionNeed:
        """The layer's need in a dtype; kv_dtype: the cache's, where it is another."""
        return AttentionNeed(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 * 2,
            window=self.window,
            softcap=self.softcap,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            tokens_per_block=self.tokens_per_block,
        )


MIXED = ((37, 1), (0, 1), (150, 1), (16, 23), (0, 40), (37, 16))

CASES = (
    AttentionCase("one_token", ((0, 1),)),
    AttentionCase("decode_alone", ((99, 1),), num_q_heads=9, num_kv_heads=3),
    AttentionCase("decode_split_over_many_items", ((700, 1), (3, 1), (200, 1))),
    AttentionCase("decode_at_block_boundaries", ((14, 1), (15, 1), (16, 1), (31, 1), (32, 1), (63, 1), (64, 1))),
    AttentionCase("decode_with_padding_rows", ((40, 1), (63, 1), (0, 0), (0, 0)), extra_tokens=2),
    AttentionCase("prefill_whole", ((0, 7), (0, 16), (0, 17), (0, 130))),
    AttentionCase("prefill_after_a_prefix_of_16", ((16, 48),)),
    AttentionCase("prefill_after_a_prefix_of_37", ((37, 90),)),
    AttentionCase("prefill_of_all_but_one", ((99, 1), (128, 2))),
    AttentionCase("a_row_of_one_token_among_prefills", ((0, 33), (50, 1), (5, 12))),
    AttentionCase("mixed", MIXED),
    AttentionCase("mixed_with_padding", (*MIXED, (0, 0)), extra_tokens=5),
    AttentionCase("multi_query", MIXED, num_q_heads=8, num_kv_heads=1),
    AttentionCase("one_head_each", MIXED, num_q_heads=2, num_kv_heads=2),
    AttentionCase("group_of_three", MIXED, num_q_heads=9, num_kv_heads=3),
    AttentionCase("group_of_seven", MIXED, num_q_heads=14, num_kv_heads=2),
    AttentionCase("head_dim_80", MIXED, head_dim=80),
    AttentionCase("head_dim_96", MIXED, head_dim=96),
    AttentionCase("head_dim_128_block_32", MIXED, head_dim=128, tokens_per_block=32),
    AttentionCase("head_dim_256", MIXED, num_q_heads=4, num_kv_heads=1, head_dim=256, tokens_per_block=32),
    AttentionCase("block_64", MIXED, tokens_per_block=64),
    AttentionCase("window_20", MIXED, window=20),
    AttentionCase("window_of_one", MIXED, window=1),
    AttentionCase("window_100_long", ((300, 1), (90, 1), (0, 250), (220, 70)), window=100),
    AttentionCase("softcap", MIXED, softcap=3.0),
    AttentionCase("window_and_softcap", MIXED, window=33, softcap=5.0),
    AttentionCase("many_short_rows", tuple((5 + 7 * i, 1) for i in range(12))),
)


@dataclass(slots=True)
class Step:
    """A case's tensors."""

    q: Tensor
    kv_cache: Tensor
    metadata: AttentionMetadata
    keys: list[Tensor]
    """Each row's keys [length, num_kv_heads, head_dim], in order."""
    values: list[Tensor]
    kv_scale: Tensor | None = None


def build_step(case: AttentionCase, dtype: torch.dtype, device: str, fill: float = float("nan")) -> Step:
    """Random rows scattered over an arena of several layers; every slot that no row's token owns holds `fill`."""
    generator = torch.Generator().manual_seed(len(case.name))
    size, rows = case.tokens_per_block, case.rows
    lens = [cached + new for cached, new in rows]
    counts = [-(-length // size) for length in lens]
    num_blocks = sum(counts) + 3
    arena = torch.full((num_blocks, case.num_layers, 2, case.num_kv_heads, size, case.head_dim), fill)
    ids = torch.randperm(num_blocks, generator=generator)
    table = torch.zeros(len(rows), max(counts) + 2, dtype=torch.int32)
    layer = case.num_layers - 1
    keys, values, slots, used = [], [], [], 0
    for row, length in enumerate(lens):
        blocks = ids[used : used + counts[row]]
        used += counts[row]
        table[row, : counts[row]] = blocks
        kv = torch.randn(2, length, case.num_kv_heads, case.head_dim, generator=generator)
        place = torch.arange(length)
        arena[blocks[place // size], layer, :, :, place % size] = kv.transpose(0, 1)
        keys.append(kv[0].to(dtype))
        values.append(kv[1].to(dtype))
        slots.append((blocks[place // size] * size + place % size)[rows[row][0] :])
    new = torch.tensor([n for _, n in rows])
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    starts[1:] = new.cumsum(0)
    num_tokens = int(starts[-1]) + case.extra_tokens
    padding = torch.full((case.extra_tokens,), -1)
    first_prefill_row = next((row for row, (_, n) in enumerate(rows) if n > 1), len(rows))
    num_decode_rows = max((row + 1 for row, (_, n) in enumerate(rows) if n == 1), default=0)
    arena = arena.to(device, dtype)
    metadata = AttentionMetadata(
        num_tokens=num_tokens,
        num_rows=len(rows),
        num_decode_rows=num_decode_rows,
        first_prefill_row=first_prefill_row,
        max_query_len=max(n for _, n in rows),
        max_seq_len=max(lens),
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        positions=torch.cat([torch.arange(c, c + n) for c, n in rows] + [padding * 0]).to(device),
        block_tables=(table.to(device),),
        slot_mapping=(torch.cat([*slots, padding]).to(device),),
    )
    # q as the fused op hands it out on the CPU: a view into wider rows.
    wide = torch.randn(num_tokens, case.num_q_heads + 2 * case.num_kv_heads, case.head_dim, generator=generator)
    q = wide.to(device, dtype)[:, : case.num_q_heads]
    return Step(q, arena[:, layer], metadata, keys, values)


def quantize_step(case: AttentionCase, step: Step, kv_dtype: str, fill: int) -> None:
    """Put a step's keys and values into a cache of 8 bits, `fill` in every other byte, and keep what they are there."""
    size, device = case.tokens_per_block, step.kv_cache.device
    stored = torch.uint8 if kv_dtype == "fp8" else torch.int8
    tile = tile_size(size, case.head_dim, stored)
    arena = torch.full((len(step.kv_cache), case.num_layers, 2, case.num_kv_heads, tile), fill, dtype=torch.uint8)
    cache = layer_view(arena.view(stored), case.num_layers - 1, size, case.head_dim)
    scale = 0.02 + torch.rand(2, case.num_kv_heads, generator=torch.Generator().manual_seed(1)) / 50
    for row, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
        kv = torch.stack((keys, values), 1).float().cpu()
        if not len(kv):
            continue
        place = torch.arange(len(kv))
        blocks = step.metadata.block_tables[0][row].long().cpu()[place // size]
        write_cache(kv, cache, blocks * size + place % size, scale if kv_dtype == "fp8" else None)
        if kv_dtype == "fp8":
            spread = scale[None, :, :, None]
            kept = (kv / spread).clamp(-448, 448).to(torch.float8_e4m3fn).float() * spread
        else:
            spread = (kv.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
            kept = (kv / spread).round().clamp(-127, 127) * spread
            torch.testing.assert_close(token_scales(cache)[blocks, :, :, place % size].float(), spread[..., 0])
        assert (kept - kv).abs().max() < 0.08 * kv.abs().max(), "so coarse that nothing is tested"
        step.keys[row], step.values[row] = kept[:, 0], kept[:, 1]
    moved = arena.view(stored).to(device)
    step.kv_cache = layer_view(moved, case.num_layers - 1, size, case.head_dim)
    step.kv_scale = scale.to(device) if kv_dtype == "fp8" else None


def dense_attention(case: AttentionCase, need: AttentionNeed, step: Step) -> Tensor:
    """[tokens of the rows, num_q_heads * head_dim] in fp64, one query at a time."""
    q = step.q.double().cpu()
    out = []
    token = 0
    for (cached, new), keys, values in zip(case.rows, step.keys, step.values, strict=True):
        for position in range(cached, cached + new):
            first = 0 if need.window is None else max(0, position + 1 - need.window)
            for head in range(need.num_q_heads):
                kv_head = head // (need.num_q_heads // need.num_kv_heads)
                scores = keys[first : position + 1, kv_head].double() @ q[token, head] * need.scale
                if need.softcap is not None:
                    scores = need.softcap * torch.tanh(scores / need.softcap)
                out.append(scores.softmax(0) @ values[first : position + 1, kv_head].double())
            token += 1
    return torch.stack(out).view(token, -1)


# Largest error of a result of size about 1. The roundings of the inputs are shared with the dense form; those of the
# weights and of the result are not.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
