# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of the kernels: bf16, graphs, no waiting, and offsets past 2**31.

tests/kernels/test_ops.py and tests/attention/test_backends.py run on the GPU too where there is one, in bf16 as well.
"""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_cases import CASES, TOLERANCE, AttentionCase, build_step, dense_attention

from headrace.attention.base import AttentionMetadata, AttentionNeed
from headrace.attention.choose import choose_backend
from headrace.kernels.activation import silu_and_mul
from headrace.kernels.norm import fused_add_rms_norm, rms_norm
from headrace.kernels.rope import qk_norm_rope_cache_write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU"),
]

BF16 = torch.bfloat16


def decode_metadata(lens: torch.Tensor, table: torch.Tensor, max_seq_len: int) -> AttentionMetadata:
    """One new token a row."""
    rows = len(lens)
    return AttentionMetadata(
        num_tokens=rows,
        num_rows=rows,
        num_decode_rows=rows,
        first_prefill_row=rows,
        max_query_len=1,
        max_seq_len=max_seq_len,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        seq_lens=lens,
        positions=lens.long() - 1,
        block_tables=(table,),
        slot_mapping=(torch.zeros(rows, dtype=torch.long, device="cuda"),),
    )


def contiguous_kv(kv_cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """A row's K and V [2, num_kv_heads, length, head_dim]."""
    return kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bf16_attention_agrees_with_dense_attention(case: AttentionCase) -> None:
    step = build_step(case, BF16, "cuda")
    need = case.need("bfloat16")
    backend = choose_backend(need, "cuda")
    assert backend.name == "TRITON"
    got = backend.forward(step.q, step.kv_cache, step.metadata, 0)
    expected = dense_attention(case, need, step)
    torch.testing.assert_close(got[: len(expected)].double().cpu(), expected, rtol=0, atol=TOLERANCE[BF16])


def test_a_long_prefill_agrees_with_torch() -> None:
    """4,000 tokens after a prefix of 1,000, at a real model's width."""
    case = AttentionCase("long", ((1000, 4000),), 32, 8, 128, tokens_per_block=32)
    step = build_step(case, BF16, "cuda")
    need = replace(case.need("bfloat16"), scale=128**-0.5)
    got = choose_backend(need, "cuda").forward(step.q, step.kv_cache, step.metadata, 0).view(4000, 32, 128)
    k, v = step.keys[0].cuda().transpose(0, 1), step.values[0].cuda().transpose(0, 1)
    mask = torch.ones(4000, 5000, dtype=torch.bool, device="cuda").tril(1000)
    expected = F.scaled_dot_product_attention(step.q.transpose(0, 1)[None], k[None], v[None], mask, enable_gqa=True)
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("lens", [(32000,), (31, 7000, 1, 513), tuple(range(1, 1500, 23))], ids=str)
def test_a_long_decode_agrees_with_torch(lens: tuple[int, ...]) -> None:
    case = AttentionCase("long", tuple((n - 1, 1) for n in lens), 32, 8, 128, tokens_per_block=32)
    step = build_step(case, BF16, "cuda")
    need = replace(case.need("bfloat16"), scale=128**-0.5)
    got = choose_backend(need, "cuda").forward(step.q, step.kv_cache, step.metadata, 0)
    for row in range(len(lens)):
        k, v = step.keys[row].cuda().transpose(0, 1), step.values[row].cuda().transpose(0, 1)
        q = step.q[row][None, :, None]
        expected = F.scaled_dot_product_attention(q, k[None], v[None], enable_gqa=True).flatten()
        torch.testing.assert_close(got[row], expected, rtol=2e-2, atol=1e-2)


def test_a_captured_decode_follows_lengths_and_blocks_that_change() -> None:
    """One graph, captured at the ceilings; each replay reads what then lies in the tensors, padding rows included."""
    rows, ceiling, blocks = 6, 2048, 512
    generator = torch.Generator(device="cuda").manual_seed(0)
    arena = torch.randn(blocks, 2, 2, 2, 32, 128, generator=generator, device="cuda", dtype=BF16)
    need = AttentionNeed(8, 2, 128, 128**-0.5)
    backend = choose_backend(need, "cuda")
    q = torch.randn(rows, 8, 128, device="cuda", dtype=BF16)
    lens = torch.full((rows,), ceiling, dtype=torch.int32, device="cuda")
    table = torch.zeros(rows, ceiling // 32, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        return backend.forward(q, arena[:, 1], decode_metadata(lens, table, ceiling), 0)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for now in ((5, 1, 700, 2048, 33, 0), (64, 2000, 0, 0, 0, 0), (1, 2, 3, 4, 5, 6)):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        table.copy_(torch.randint(0, blocks, table.shape, generator=generator, device="cuda"))
        graph.replay()
        for row, length in enumerate(now):
            if length == 0:
                continue
            k, v = contiguous_kv(arena[:, 1], table[row].long(), length)
            expected = F.scaled_dot_product_attention(q[row][None, :, None], k[None], v[None], enable_gqa=True)
            torch.testing.assert_close(out[row], expected.flatten(), rtol=2e-2, atol=1e-2)


# torch warns that this mode may miss some operations.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_gpu() -> None:
    """A step of all four ops, decode and prefill rows together, after one warm-up."""
    case = next(case for case in CASES if case.name == "mixed_with_padding")
    step = build_step(case, BF16, "cuda")
    need = case.need("bfloat16")
    backend = choose_backend(need, "cuda")
    heads = case.num_q_heads + 2 * case.num_kv_heads
    tokens = step.metadata.num_tokens
    qkv = torch.randn(tokens, heads * case.head_dim, device="cuda", dtype=BF16)
    table = torch.randn(4096, case.head_dim, device="cuda")
    weight = torch.ones(qkv.shape[1], device="cuda", dtype=BF16)
    positions, slots = step.metadata.positions, step.metadata.slot_mapping[0]
    ops = [op.choose("cuda") for op in (rms_norm, fused_add_rms_norm, silu_and_mul, qk_norm_rope_cache_write)]
    rows = (None, None, 1e-6, table, positions, step.kv_cache, slots)

    def run() -> None:
        step.metadata.plans.clear()
        x = ops[0](qkv, weight, 1e-6)
        x, residual = ops[1](x, qkv.clone(), weight, 1e-6)
        ops[2](residual)
        q = ops[3](x, *rows, case.num_q_heads, case.num_kv_heads, case.head_dim)
        backend.forward(q, step.kv_cache, step.metadata, 0)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_pass_two_to_the_31() -> None:
    """An arena of 4.8 G elements: its last blocks are written and read where they are."""
    layers, heads, size, dim = 32, 8, 32, 128
    block_elements = layers * 2 * heads * size * dim
    num_blocks = 4_800_000_000 // block_elements
    if torch.cuda.mem_get_info()[0] < 2 * num_blocks * block_elements + (1 << 30):
        pytest.skip("needs 11 GB of free GPU memory")
    arena = torch.zeros(num_blocks, layers, 2, heads, size, dim, device="cuda", dtype=BF16)
    layer = arena[:, layers - 1]
    tokens = 40
    table = torch.tensor([[num_blocks - 1, num_blocks - 2]], dtype=torch.int32, device="cuda")
    slots = (table[0].long().repeat_interleave(size) * size + torch.arange(2 * size, device="cuda") % size)[:tokens]
    qkv = torch.randn(tokens, 3 * heads * dim, device="cuda", dtype=BF16)
    write = qk_norm_rope_cache_write.choose("cuda")
    q = write(qkv, None, None, 1e-6, None, torch.arange(tokens, device="cuda"), layer, slots, heads, heads, dim)
    k, v = contiguous_kv(layer, table[0].long(), tokens)
    torch.testing.assert_close(k, qkv.view(tokens, 3, heads, dim)[:, 1].transpose(0, 1), rtol=0, atol=0)
    torch.testing.assert_close(v, qkv.view(tokens, 3, heads, dim)[:, 2].transpose(0, 1), rtol=0, atol=0)
    backend = choose_backend(AttentionNeed(heads, heads, dim, dim**-0.5), "cuda")
    lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    last = backend.forward(q[-1:].contiguous(), layer, decode_metadata(lens, table, 64), 0)
    prefill = decode_metadata(lens, table, 64)
    prefill.num_tokens, prefill.max_query_len = tokens, tokens
    prefill.num_decode_rows = prefill.first_prefill_row = 0
    prefill.query_start_loc = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    got = backend.forward(q, layer, prefill, 0)
    expected = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], is_causal=True)[0]
    torch.testing.assert_close(got, expected.transpose(0, 1).flatten(1), rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(last[0], got[-1], rtol=2e-2, atol=1e-2)
