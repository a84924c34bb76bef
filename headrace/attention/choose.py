# SPDX-License-Identifier: Apache-2.0
"""A need and a device in, a backend out; or every reason why none fits."""

import importlib.util

from headrace.attention.base import CAPABILITIES, AttentionBackend, AttentionNeed
from headrace.errors import ConfigError
from headrace.kernels.op import bind

# name -> the package it needs, where its class is.
BACKENDS: dict[str, tuple[str | None, str]] = {
    "TRITON": ("triton", "headrace.attention.triton:TritonAttention"),
    "VANILLA": (None, "headrace.attention.reference:VanillaAttention"),
}

NOT_BUILT = ("FLASHINFER",)


def refusals(name: str, need: AttentionNeed, device_type: str) -> list[str]:
    """Why a backend cannot serve a need on a device; empty when it can."""
    can, package = CAPABILITIES[name], BACKENDS[name][0]
    reasons = []
    if device_type not in can.device_types:
        reasons.append(f"runs on {' and '.join(can.device_types)}, not on {device_type}")
    if package and importlib.util.find_spec(package) is None:
        reasons.append(f"the package {package} is not installed")
    if need.head_dim > can.max_head_dim:
        reasons.append(f"head_dim {need.head_dim} is over {can.max_head_dim}")
    if need.kv_dtype not in can.kv_dtypes:
        reasons.append(f"kv_cache_config.dtype {need.kv_dtype} is none of {', '.join(can.kv_dtypes)}")
    if need.num_q_heads % need.num_kv_heads:
        reasons.append(f"{need.num_q_heads} query heads do not divide over {need.num_kv_heads} KV heads")
    if need.softcap is not None and not can.softcap:
        reasons.append("no logit softcap")
    if need.window is not None and not can.window:
        reasons.append("no sliding window")
    return reasons


def choose_backend(need: AttentionNeed, device_type: str, setting: str = "AUTO") -> AttentionBackend:
    """The backend that `attn_backend` names, bound to a layer's need; AUTO takes the first that serves it.

    device_type: `cpu` or `cuda`. Raises ConfigError with every refusal when none serves.
    """
    if setting in NOT_BUILT:
        raise ConfigError(
            f"attn_backend {setting} is not built yet: use AUTO, or one of {', '.join(BACKENDS)}.", param="attn_backend"
        )
    if setting != "AUTO" and setting not in BACKENDS:
        raise ConfigError(
            f"attn_backend {setting} is unknown: use AUTO, or one of {', '.join(BACKENDS)}.", param="attn_backend"
        )
    refused = []
    for name in BACKENDS if setting == "AUTO" else (setting,):
        reasons = refusals(name, need, device_type)
        if not reasons:
            backend: AttentionBackend = bind(BACKENDS[name][1])(need)
            return backend
        refused.append(f"{name}: {'; '.join(reasons)}")
    raise ConfigError(
        f"attn_backend {setting} cannot serve this model on {device_type} ({'. '.join(refused)}): use AUTO, or another "
        f"of {', '.join(BACKENDS)}.",
        param="attn_backend",
    )
