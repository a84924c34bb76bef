# SPDX-License-Identifier: Apache-2.0
"""RoPE tables against Transformers, with the numbers of real checkpoints."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.attention.base import AttentionMetadata
from headrace.config.rope import RopeConfig, read_rope
from headrace.layers.build import BuildContext
from headrace.layers.rope import has_long_table, long_positions, rope_table

LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
PHI_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + i / 40 for i in range(48)], "long_factor": [1.0 + i * 1.3 for i in range(48)],
}  # fmt: skip

CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    # name: (head_dim, max_position_embeddings, rope_parameters)
    "llama3": (128, 131072, LLAMA31),
    "llama3-small-heads": (64, 131072, LLAMA31 | {"factor": 32.0}),
    "yarn": (128, 131072, QWEN_YARN),
    "yarn-untruncated": (128, 131072, QWEN_YARN | {"truncate": False, "beta_fast": 24.0}),
    "yarn-mscale": (64, 163840, QWEN_YARN | {"factor": 40.0, "mscale": 0.8, "mscale_all_dim": 1.0}),
    "yarn-attention-factor": (64, 131072, QWEN_YARN | {"attention_factor": 1.1}),
    "linear": (256, 131072, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}),
    "dynamic": (128, 2048, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "longrope": (96, 131072, PHI_LONG),
    "partial": (128, 4096, {"rope_type": "linear", "rope_theta": 1e4, "factor": 1.0, "partial_rotary_factor": 0.75}),
}


def context(max_positions: int) -> BuildContext:
    """Enough of a context to build a table."""
    cpu = torch.device("cpu")
    return BuildContext(torch.float32, cpu, lambda _: None, lambda _: None, torch.float32, max_positions)  # type: ignore


def reference(case: str, length: int) -> torch.Tensor:
    """Transformers' table [length, rot_dim] for a sequence of that length."""
    head_dim, max_positions, parameters = CASES[case]
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(parameters))
    rates, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rates)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * scale


def read(case: str) -> RopeConfig:
    _, max_positions, parameters = CASES[case]
    return read_rope({"rope_parameters": parameters}, max_positions)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [100, 4097])
def test_a_table_is_the_one_transformers_computes(case: str, length: int) -> None:
    head_dim = CASES[case][0]
    rope = read(case)
    table = rope_table(context(length), rope, head_dim)
    if has_long_table(rope, length):
        table = table[length:]  # a sequence of `length` reads the second half
    # fp32 angles of some thousand radians are known to about 1e-4 of a radian.
    torch.testing.assert_close(table, reference(case, length), rtol=0, atol=2e-3)
    torch.testing.assert_close(table[:64], reference(case, length)[:64], rtol=0, atol=2e-5)


def test_layers_with_equal_rope_share_a_table() -> None:
    ctx = context(128)
    one, two = (rope_table(ctx.sub(name), read("llama3"), 128) for name in ("layers.0", "layers.1"))
    assert one.data_ptr() == two.data_ptr()
    assert rope_table(ctx, read("yarn"), 128).data_ptr() != one.data_ptr()


def test_only_rows_with_a_long_prompt_read_the_long_table() -> None:
    rope = RopeConfig(kind="longrope", original_max_position_embeddings=20, short_factor=(1.0,), long_factor=(2.0,))
    # A decode, a row without tokens, a chunk; one token of padding.
    starts = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    positions = torch.tensor([30, 5, 6, 7, 0])
    metadata = AttentionMetadata(5, 3, 1, 1, 3, 31, starts, starts[1:], positions, (), ())
    prompt_lens = torch.tensor([20, 99, 21], dtype=torch.int32)
    rows = long_positions(positions, metadata, prompt_lens, rope, 64)
    assert rows[:4].tolist() == [30, 5 + 64, 6 + 64, 7 + 64]
    assert rows[4] < 2 * 64  # inside the table, whatever it is
