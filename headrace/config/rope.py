# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings: one record for every scaling, and the only reader of its json spellings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from headrace.errors import ModelLoadError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
KIND_SPELLINGS = {"su": "longrope", "none": "default", "": "default", "mrope": "default"}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. Fields that a kind does not use keep their defaults."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    partial_rotary_factor: float = 1.0
    """Share of head_dim that is rotated (the leading part)."""
    factor: float = 1.0
    """linear, dynamic, llama3, yarn, longrope: how far positions are stretched."""
    original_max_position_embeddings: int | None = None
    """llama3, yarn, longrope: positions the model was trained on before it was stretched; dynamic:
    max_position_embeddings. Always set for these."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    attention_factor: float | None = None
    """yarn, longrope: cos and sin are multiplied by it; None: derived from `factor` as the kind's formula says."""
    beta_fast: float = 32.0
    """yarn."""
    beta_slow: float = 1.0
    """yarn."""
    mscale: float | None = None
    """yarn."""
    mscale_all_dim: float | None = None
    """yarn."""
    truncate: bool = True
    """yarn: whether the correction range is rounded to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    """longrope: one per rotated pair, for sequences up to `original_max_position_embeddings`."""
    long_factor: tuple[float, ...] = ()
    """longrope: the same for longer ones."""

    def rotary_dim(self, head_dim: int) -> int:
        """Leading dimensions of a head that are rotated; even."""
        return int(head_dim * self.partial_rotary_factor) // 2 * 2


def read_rope(hf: Mapping[str, Any], max_position_embeddings: int, layer_type: str | None = None) -> RopeConfig:
    """The rotary embedding of an HF config, spelled as in v4 (`rope_theta`, `rope_scaling`) or v5 (`rope_parameters`).

    layer_type: which entry to take where v5 keeps one per layer type.
    """
    params = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if layer_type is not None and isinstance(params.get(layer_type), Mapping):
        params = params[layer_type]
    theta = params.get("rope_theta") or hf.get("rope_theta") or 10000.0
    partial = params.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    spelled = str(params.get("rope_type") or params.get("type") or "default").lower()
    kind = KIND_SPELLINGS.get(spelled, spelled)
    if kind not in get_args(RopeKind):
        raise ModelLoadError(
            f"RoPE scaling {spelled!r} is not supported; supported are {', '.join(get_args(RopeKind))}."
        )
    # A value beside rope_parameters wins over the one inside, as in Transformers: Phi-3 keeps the trained length there.
    original = hf.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    return _stretched(cast(RopeKind, kind), float(theta), float(partial), params, original, max_position_embeddings)


def _stretched(
    kind: RopeKind, theta: float, partial: float, params: Mapping[str, Any], original: int | None, max_positions: int
) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=partial)
    if kind in ("llama3", "yarn", "longrope"):
        original = original or max_positions
    if kind == "dynamic":
        original = max_positions
    factor = params.get("factor")
    if factor is None and kind in ("longrope", "yarn"):
        factor = max_positions / (original or max_positions)
    if factor is None:
        raise ModelLoadError(f"RoPE scaling {kind!r} has no factor in config.json.")
    optional = {
        name: params[name]
        for name in (
            "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow",
            "mscale", "mscale_all_dim", "truncate",
        )
        if params.get(name) is not None
    }  # fmt: skip
    for name in ("short_factor", "long_factor"):
        optional[name] = tuple(float(f) for f in params.get(name) or ())
    if kind == "longrope" and not (optional["short_factor"] and optional["long_factor"]):
        raise ModelLoadError("RoPE scaling 'longrope' needs short_factor and long_factor in config.json.")
    return RopeConfig(
        theta=theta,
        kind=kind,
        partial_rotary_factor=partial,
        factor=float(factor),
        original_max_position_embeddings=int(original) if original else None,
        **optional,
    )
