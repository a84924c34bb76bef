# SPDX-License-Identifier: Apache-2.0
"""`headrace config MODEL`: the resolved configuration and where each value came from, as YAML that loads again."""

import json
import sys
from typing import Any

from headrace.cli.flags import Invocation
from headrace.cli.settings import read_settings, set_log_level
from headrace.config.base import Config, Leaf, leaves, value_of
from headrace.config.checkpoint import load_model_config
from headrace.config.resolve import DeviceFacts, ResolvedConfig, resolve
from headrace.config.sources import Settings
from headrace.errors import ConfigError
from headrace.utils.hub import resolve_model
from headrace.utils.machine import available_memory, cpu_has_bf16, cpu_name, nvidia_gpus
from headrace.utils.threads import choose_num_threads


def run(invocation: Invocation) -> int:
    """Print and return 0; a value that cannot be is a ConfigError."""
    settings = read_settings(invocation)
    set_log_level(settings.server.log_level if "log_level" in settings.origin else None)
    args = settings.args
    source = resolve_model(args.model, args.revision, need_weights=False)
    resolved = resolve(args, load_model_config(source), find_device(args.device), settings.origin)
    sys.stdout.write(render(settings, resolved, source.name))
    for sentence in (*invocation.became, *settings.overridden, *resolved.notes):
        sys.stderr.write(f"{sentence}\n")
    return 0


def find_device(wanted: str) -> DeviceFacts:
    """The device that `wanted` (auto, cuda or cpu) means here, asked of the driver rather than of torch."""
    gpus = nvidia_gpus() if wanted != "cpu" else []
    if gpus:
        return DeviceFacts("cuda", gpus[0].name, gpus[0].total_memory, gpus[0].capability, choose_num_threads())
    if wanted == "cuda":
        raise ConfigError(
            "device = cuda is not possible here: nvidia-smi finds no GPU; use cpu or auto.", param="device"
        )
    return DeviceFacts("cpu", cpu_name(), available_memory(), None, choose_num_threads(), cpu_has_bf16())


def render(settings: Settings, resolved: ResolvedConfig, name: str) -> str:
    """YAML: every setting with its final value, and as a comment where it came from."""
    final = {
        "device": resolved.device,
        "dtype": resolved.dtype,
        "kv_cache_config.dtype": resolved.kv_dtype,
        "max_seq_len": resolved.max_seq_len,
        "scheduler_config.max_prefill_tokens": resolved.max_prefill_tokens,
        "attn_backend": resolved.attn_backend,
        "num_threads": resolved.num_threads,
    }
    model = resolved.model
    lines = [
        f"# {name}: {model.architecture}, {model.num_params() / 1e6:.0f}M weights, {model.num_layers} layers, "
        f"{model.num_q_heads} query and {model.num_kv_heads} key-value heads of {model.head_dim}"
    ]
    rows: list[tuple[str, str]] = []
    for tree in (settings.args, settings.server):
        rows += _rows(tree, final, {**resolved.origin, **settings.origin})
    width = min(60, max(len(left) for left, _ in rows))
    lines += [f"{left:<{width}}  # {why}" if why else left for left, why in rows]
    return "\n".join(lines) + "\n"


def _rows(tree: Config, final: dict[str, Any], origin: dict[str, str]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for leaf in leaves(type(tree), groups=True):
        indent = "  " * (len(leaf.path) - 1)
        if len(leaf.path) > 1 and value_of(tree, leaf.path[:-1]) is None:
            continue
        if leaf.group is not None and value_of(tree, leaf.path) is not None:
            rows.append((f"{indent}{leaf.path[-1]}:", ""))
            continue
        why = origin.get(leaf.name, "default")
        if leaf.hint.secret and value_of(tree, leaf.path):
            why = f"{why}, hidden"
        if leaf.name in final and value_of(tree, leaf.path) != final[leaf.name] and not why.startswith("auto"):
            why = f"{why}, resolved"
        rows.append((f"{indent}{leaf.path[-1]}: {_shown(tree, leaf, final)}", why))
    return rows


def _shown(tree: Config, leaf: Leaf, final: dict[str, Any]) -> str:
    value = final.get(leaf.name, value_of(tree, leaf.path))
    if leaf.hint.secret and value:
        return "[]"
    return value if isinstance(value, str) and value.isidentifier() and value != "none" else json.dumps(value)
