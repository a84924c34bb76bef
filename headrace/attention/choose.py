# SPDX-License-Identifier: Apache-2.0
"""A need and a device in, a backend out; or every reason why none fits."""

import importlib.util

import torch

from headrace.attention.base import ALIKE_CAPABILITIES, CAPABILITIES, AttentionBackend, AttentionNeed
from headrace.attention.long_chunk import serves
from headrace.errors import ConfigError
from headrace.kernels.op import bind

# name -> the package it needs, where its class is.
BACKENDS: dict[str, tuple[str | None, str]] = {
    "TRITON": ("triton", "headrace.attention.triton:TritonAttention"),
    "VANILLA": (None, "headrace.attention.reference:VanillaAttention"),
}

# The same under `deterministic`.
ALIKE_BACKENDS: dict[str, tuple[str | None, str]] = {
    "TRITON": ("triton", "headrace.attention.triton:AlikeTritonAttention"),
    "VANILLA": (None, "headrace.attention.alike:AlikeVanillaAttention"),
}


def refusals(
    name: str,
    need: AttentionNeed,
    device_type: str,
    compute_capability: tuple[int, int] | None = None,
    deterministic: bool = False,
) -> list[str]:
    """Why a backend cannot serve a need on a device; empty when it can. compute_capability: a GPU's, where known."""
    can, package = (ALIKE_CAPABILITIES if deterministic else CAPABILITIES)[name], BACKENDS[name][0]
    reasons = []
    if device_type not in can.device_types:
        reasons.append(f"runs on {' and '.join(can.device_types)}, not on {device_type}")
    least = can.min_compute_capability
    if least is not None and compute_capability is not None and compute_capability < least:
        reasons.append(f"needs compute capability {_dotted(least)}, this GPU has {_dotted(compute_capability)}")
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


class BackendChooser:
    """Chooses for the layers of one model, and keeps what was chosen and what was passed over."""

    def __init__(
        self,
        device_type: str,
        setting: str = "AUTO",
        compute_capability: tuple[int, int] | None = None,
        deterministic: bool = False,
    ) -> None:
        """device_type: `cpu` or `cuda`. setting: `attn_backend`. ConfigError for a name that is no backend."""
        if setting != "AUTO" and setting not in BACKENDS:
            raise ConfigError(
                f"attn_backend {setting} is unknown: use AUTO, or one of {', '.join(BACKENDS)}.", param="attn_backend"
            )
        self._device_type = device_type
        self._setting = setting
        self._compute_capability = compute_capability
        self._deterministic = deterministic
        self._chosen: dict[str, dict[str, None]] = {}
        """Backends chosen, each with the refusals it was chosen after; in order, each once."""
        self._needs: dict[AttentionNeed, str] = {}
        """The layers' needs, each once, and the backend of each."""

    def __call__(self, need: AttentionNeed) -> AttentionBackend:
        """The backend that the setting names, bound to a layer's need; AUTO takes the first that serves it.

        Raises ConfigError with every refusal when none serves.
        """
        refused: list[str] = []
        for name in BACKENDS if self._setting == "AUTO" else (self._setting,):
            reasons = refusals(name, need, self._device_type, self._compute_capability, self._deterministic)
            if not reasons:
                self._chosen.setdefault(name, {}).update(dict.fromkeys(refused))
                self._needs[need] = name
                backends = ALIKE_BACKENDS if self._deterministic else BACKENDS
                backend: AttentionBackend = bind(backends[name][1])(need)
                return backend
            refused.append(f"{name}: {'; '.join(reasons)}")
        remedy = "" if self._setting == "AUTO" else ": use AUTO"
        with_what = " with deterministic = true" if self._deterministic else ""
        raise ConfigError(
            f"attn_backend {self._setting} cannot serve this model on {self._device_type}{with_what} "
            f"({'. '.join(refused)}){remedy}.",
            param="attn_backend",
        )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the backends that the layers have, in the order of their first layer."""
        return tuple(self._chosen)

    @property
    def reads_unused_slots(self) -> bool:
        """Whether any layer's backend does; see `AttentionCapability`."""
        return any(CAPABILITIES[name].reads_unused_slots for name in self._chosen)

    def long_needs(self, device: torch.device) -> list[AttentionNeed]:
        """Needs of the layers whose long chunks go through cuDNN."""
        if self._deterministic:
            return []
        return [need for need, name in self._needs.items() if name == "TRITON" and serves(need, device)]

    @property
    def capturable(self) -> bool:
        """Whether every layer's backend runs in a CUDA graph."""
        return all(CAPABILITIES[name].capturable for name in self._chosen)

    def describe(self) -> str:
        """What was chosen, with every refusal that came before it."""
        return ", ".join(
            f"{name} ({'. '.join(refused)})" if refused else name for name, refused in self._chosen.items()
        )


def choose_backend(need: AttentionNeed, device_type: str, setting: str = "AUTO") -> AttentionBackend:
    """One layer's backend; see `BackendChooser`."""
    return BackendChooser(device_type, setting)(need)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
