# SPDX-License-Identifier: Apache-2.0
"""Other spellings of flags, so that command lines written for other servers work; each use says what it became."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a flag."""

    target: str
    """The flag's own name: a dotted setting, or an option."""
    value: str | None = None
    """What the alias stands for, where it takes no value of its own."""
    inverts: bool = False
    """A boolean that says the opposite."""
    values: Mapping[str, str | None] | None = None
    """The values it may have, and what each becomes; None: nothing, as things are like that here anyway."""
    note: str = ""
    """How the meaning differs."""


ALIASES: dict[str, Alias] = {
    "extra_llm_api_options": Alias("config"),
    "max_model_len": Alias("max_seq_len"),
    "max_num_seqs": Alias("max_batch_size"),
    "max_num_batched_tokens": Alias("max_num_tokens"),
    "gpu_memory_utilization": Alias(
        "kv_cache_config.free_gpu_memory_fraction",
        note="a share of the memory left after the weights, not of the whole GPU",
    ),
    "free_gpu_memory_fraction": Alias("kv_cache_config.free_gpu_memory_fraction"),
    "kv_cache_free_gpu_memory_fraction": Alias("kv_cache_config.free_gpu_memory_fraction"),
    "block_size": Alias("kv_cache_config.tokens_per_block"),
    "tokens_per_block": Alias("kv_cache_config.tokens_per_block"),
    "kv_cache_dtype": Alias("kv_cache_config.dtype"),
    "kv_events_config": Alias("kv_cache_config.kv_events_config"),
    "enable_prefix_caching": Alias("kv_cache_config.enable_block_reuse"),
    "enable_block_reuse": Alias("kv_cache_config.enable_block_reuse"),
    "attention_backend": Alias("attn_backend"),
    "scheduling_policy": Alias("scheduler_config.waiting_queue_policy"),
    "async_scheduling": Alias("disable_overlap_scheduler", inverts=True),
    "enforce_eager": Alias("cuda_graph_config", value="null"),
    "tp_size": Alias("tensor_parallel_size"),
    "pp_size": Alias("pipeline_parallel_size"),
    "cp_size": Alias("context_parallel_size"),
    "ep_size": Alias("moe_expert_parallel_size"),
    "allowed_origins": Alias("allow_origins"),
    "uvicorn_log_level": Alias("log_level"),
}
# Two names of one thing in our own documents: no message.
SILENT = {"extra_llm_api_options"}
