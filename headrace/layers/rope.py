# SPDX-License-Identifier: Apache-2.0
"""Tables of rotary position embedding, in fp32, for every scaling the models use.

A table row is a position: the cosines of its `rot_dim / 2` angles, then their sines. Scalings whose angles depend on
the length of a request are settled so that a token's KV never depends on how its request was cut into steps:

- dynamic: one set of angles, for the longest request the engine takes (`max_positions`). Up to the length that the
  model was trained on they are the unscaled ones.
- longrope: two tables, one after the other, short factors first. A request reads the long one, for its whole life,
  if its prompt is longer than `original_max_position_embeddings`. Transformers decides in the same way at the prompt;
  unlike here, it starts over with the long factors when the output crosses that length. Where no request can be
  longer there is the short table alone.
"""

import math

import torch
from torch import Tensor

from headrace.attention.base import AttentionMetadata
from headrace.config.rope import RopeConfig
from headrace.layers.build import BuildContext


def rope_table(ctx: BuildContext, rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [max_positions, rot_dim] (twice the rows for two longrope tables); the same tensor for equal arguments."""
    key = (rope, head_dim)
    if key not in ctx.tables:
        sets, scale = _angle_rates(rope, rope.rotary_dim(head_dim), ctx.max_positions)
        positions = torch.arange(ctx.max_positions, dtype=torch.float32)
        angles = torch.cat([torch.outer(positions, rates) for rates in sets])
        ctx.tables[key] = (torch.cat([angles.cos(), angles.sin()], dim=-1) * scale).to(ctx.device)
    return ctx.tables[key]


def trained_len(rope: RopeConfig) -> int:
    """Positions the model was trained on before they were stretched; every kind that asks for it has it."""
    assert rope.original_max_position_embeddings is not None
    return rope.original_max_position_embeddings


def has_long_table(rope: RopeConfig, max_positions: int) -> bool:
    """Whether the table has a second half for long prompts."""
    return rope.kind == "longrope" and max_positions > trained_len(rope)


def long_positions(
    positions: Tensor, metadata: AttentionMetadata, prompt_lens: Tensor, rope: RopeConfig, max_positions: int
) -> Tensor:
    """Table rows for `positions`: those of rows with a long prompt moved into the long table. No device sync."""
    tokens = torch.arange(positions.shape[0], device=positions.device, dtype=metadata.query_start_loc.dtype)
    rows = torch.searchsorted(metadata.query_start_loc[1:], tokens, right=True).clamp_(max=prompt_lens.shape[0] - 1)
    return positions + (prompt_lens[rows] > trained_len(rope)) * max_positions


def _angle_rates(rope: RopeConfig, dim: int, max_positions: int) -> tuple[list[Tensor], float]:
    """Radians per position, [dim / 2], of each table, and the factor on cosines and sines."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    rates = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return [rates], 1.0
    if rope.kind == "linear":
        return [rates / rope.factor], 1.0
    if rope.kind == "dynamic":
        trained = trained_len(rope)
        stretch = rope.factor * max(max_positions, trained) / trained - (rope.factor - 1)
        return [1.0 / (rope.theta * stretch ** (dim / (dim - 2))) ** exponents], 1.0
    if rope.kind == "llama3":
        return [_llama3(rope, rates)], 1.0
    if rope.kind == "yarn":
        return [_yarn(rope, rates, dim)], _yarn_scale(rope)
    if rope.kind == "longrope":
        factors = [rope.short_factor, rope.long_factor][: 2 if has_long_table(rope, max_positions) else 1]
        return [rates / torch.tensor(f, dtype=torch.float32) for f in factors], _longrope_scale(rope)
    raise AssertionError(f"no formula for RoPE kind {rope.kind}")


def _llama3(rope: RopeConfig, rates: Tensor) -> Tensor:
    """Slow angles divided by the factor, fast ones kept, a linear blend between."""
    turns = trained_len(rope) * rates / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * rates / rope.factor + blend * rates


def _yarn(rope: RopeConfig, rates: Tensor, dim: int) -> Tensor:
    """As llama3, but blended by the index of the angle rather than by its turns."""

    def index_of(turns: float) -> float:
        return dim * math.log(trained_len(rope) / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return rates / rope.factor * slow + rates * (1 - slow)


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(trained_len(rope)))
