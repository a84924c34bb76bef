# SPDX-License-Identifier: Apache-2.0
"""Where attention's keys and values live."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, field_validator

from headrace.config.base import Common, Config, Count, Share
from headrace.config.dtype import plain_dtype

KvDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"],
    BeforeValidator(plain_dtype),
]


class KvCacheConfig(Config):
    """KV cache"""

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {
        "host_cache_size": (0,),
        "disk_cache_size": (0,),
        "disk_cache_path": (),
        "max_attention_window": (),
        "sink_token_length": (0,),
        "cross_kv_cache_fraction": (),
        "secondary_offload_min_priority": (35,),
        "event_buffer_max_size": (0,),
        "attention_dp_events_gather_period_ms": (5,),
        "kv_events_config": (),
        "enable_partial_reuse": (True, False),
        "copy_on_partial_reuse": (True, False),
        "use_uvm": (False,),
        "iteration_stats_interval": (1,),
        "mamba_ssm_cache_dtype": ("auto",),
        "mamba_state_config": (),
        "use_kv_cache_manager_v2": ("auto", True, False),
        "max_gpu_total_bytes": (0,),
        "pool_ratio": (),
        "avg_seq_len": (),
    }

    enable_block_reuse: bool = True
    """Requests that begin with the same tokens share those tokens' blocks."""
    free_gpu_memory_fraction: Annotated[Share | Literal["auto"], Common] = "auto"
    """Share of the memory left after the weights that the cache takes; auto: all but a reserve (1 GiB on a GPU)."""
    max_tokens: Count | None = None
    """Most tokens the cache holds; with a memory share, the smaller wins."""
    dtype: Annotated[KvDtype, Common] = "auto"
    """How keys and values are stored; auto: as the checkpoint asks, or the model's dtype (float32 on a CPU)."""
    tokens_per_block: int = 32
    """Tokens in a block, a power of two."""

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 8 or value > 1024 or value & (value - 1):
            raise ValueError(f"{value} is not a power of two from 8 to 1024; the usual value is 32.")
        return value
