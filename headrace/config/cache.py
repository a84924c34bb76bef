# SPDX-License-Identifier: Apache-2.0
"""Where attention's keys and values live."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headrace.config.base import Beta, Common, Config, Count, Share
from headrace.config.dtype import plain_dtype

KvDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"],
    BeforeValidator(plain_dtype),
]


class KvEventsConfig(Config):
    """KV cache event stream"""

    enable_kv_cache_events: bool = False
    """Push KV cache events, with the tokens of the blocks, to whoever connects to `endpoint`."""
    publisher: Literal["zmq", "null"] = "zmq"
    """zmq: a PUB socket; null: none."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """ZMQ address to bind; `tcp://*:5557` is every interface, and there are no keys on this port."""
    replay_endpoint: str | None = None
    """ZMQ address to bind for subscribers that missed something (a ROUTER socket); none: they cannot ask."""
    buffer_steps: Count = 10_000
    """Batches (one a step with events) that are kept for the replay."""
    hwm: Count = 100_000
    """Batches that may wait for a slow subscriber; further ones are dropped for it, which the sequence numbers show."""
    max_queue_size: Count = 100_000
    """Batches that may wait to be sent at all; further ones are dropped for everyone."""
    topic: str = ""
    """First frame of every message, for subscribers to filter by."""

    @model_validator(mode="after")
    def _two_addresses(self) -> "KvEventsConfig":
        if self.endpoint == self.replay_endpoint:
            raise ValueError(f"endpoint and replay_endpoint are both {self.endpoint}; each needs its own address.")
        return self


class KvCacheConfig(Config):
    """KV cache"""

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {
        "max_attention_window": (),
        "sink_token_length": (0,),
        "cross_kv_cache_fraction": (),
        "attention_dp_events_gather_period_ms": (5,),
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
    enable_partial_reuse: bool = True
    """Also reuse a block that begins with the same tokens and then goes on differently."""
    copy_on_partial_reuse: bool = True
    """Copy such a block; otherwise it is taken from the cache, and only where nothing uses or continues it."""
    free_gpu_memory_fraction: Annotated[Share | Literal["auto"], Common] = "auto"
    """Share of the memory left after the weights that the cache takes; auto: all but a reserve (1 GiB on a GPU)."""
    max_tokens: Count | None = None
    """Most tokens the cache holds; with a memory share, the smaller wins."""
    dtype: Annotated[KvDtype, Common] = "auto"
    """How keys and values are stored; auto: as the checkpoint asks, or the model's dtype (float32 on a CPU)."""
    tokens_per_block: int = 32
    """Tokens in a block, a power of two."""
    event_buffer_max_size: Annotated[int, Field(ge=0)] = 0
    """KV cache events that are kept for readers (`/kv_cache_events`, `LLM.get_kv_cache_events`); 0: none."""
    kv_events_config: Annotated[KvEventsConfig, Beta] = KvEventsConfig.model_construct()
    """The push stream of KV cache events."""
    host_cache_size: Annotated[int, Field(ge=0)] = 0
    """Bytes of pinned host memory for blocks that leave the device, to come back on a hit; 0: none."""
    disk_cache_path: str | None = None
    """Folder for blocks that leave the host, on a fast disk; they survive a restart. One folder may serve several."""
    disk_cache_size: Annotated[int, Field(ge=0)] = 0
    """Bytes that the files in `disk_cache_path` may take; 0: there is no disk tier."""
    secondary_offload_min_priority: Annotated[int, Field(ge=0, le=100)] = 35
    """Blocks of a lower priority than this are dropped rather than moved to the host."""

    @property
    def pushes_events(self) -> bool:
        """Whether there is a push stream."""
        return self.kv_events_config.enable_kv_cache_events and self.kv_events_config.publisher == "zmq"

    @model_validator(mode="after")
    def _a_disk_tier_has_all_it_needs(self) -> "KvCacheConfig":
        if self.disk_cache_size and self.disk_cache_path is None:
            raise ValueError(
                f"disk_cache_size ({self.disk_cache_size}) needs disk_cache_path, the folder for the blocks; name one, "
                "or leave both out."
            )
        if self.disk_cache_path is not None and not self.disk_cache_size:
            raise ValueError(
                f"disk_cache_path ({self.disk_cache_path}) needs disk_cache_size, the bytes that the files there may "
                "take; give it, or leave both out."
            )
        if self.disk_cache_size and not self.host_cache_size:
            raise ValueError(
                f"disk_cache_size ({self.disk_cache_size}) needs host_cache_size: blocks go to the disk and come back "
                "through host memory; give it some gigabytes (1 GiB is 1073741824)."
            )
        return self

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 8 or value > 1024 or value & (value - 1):
            raise ValueError(f"{value} is not a power of two from 8 to 1024; the usual value is 32.")
        return value
