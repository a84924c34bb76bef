# SPDX-License-Identifier: Apache-2.0
"""`LlmArgs`: the one declaration of every setting of the engine, and the checks that need two of them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headrace.config.base import Beta, Common, Config, Count
from headrace.config.cache import KvCacheConfig
from headrace.config.dtype import plain_dtype
from headrace.config.execution import CudaGraphConfig
from headrace.config.kv_connector import KvCacheConnectorConfig
from headrace.config.not_yet import FOREIGN_BACKENDS, FOREIGN_GENERATION_CONFIGS, TOP_LEVEL
from headrace.config.parallel import ParallelArgs
from headrace.config.scheduler import SchedulerConfig

ModelDtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(plain_dtype)]


def _plain_backend(value: Any) -> Any:
    """Backend names in capitals."""
    return FOREIGN_BACKENDS.get(value.upper(), value.upper()) if isinstance(value, str) else value


def _plain_generation_config(value: Any) -> Any:
    return FOREIGN_GENERATION_CONFIGS.get(value, value) if isinstance(value, str) else value


class ModelArgs(Config):
    """Model"""

    model: Annotated[str, Common]
    """A local Hugging Face folder, a .gguf file, a Hub id, or `demo`."""
    tokenizer: str | None = None
    """Folder or Hub id of the tokenizer, where it is not the model's own."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: token ids in, token ids out."""
    chat_template: str | None = None
    """Chat template in place of the model's: a file, or the template itself."""
    served_model_name: Annotated[str | None, Common] = None
    """Name that clients ask for; none: the name that MODEL was given as."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    trust_remote_code: bool = False
    """Taken and without effect: code that comes with a checkpoint is never run."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the right scale, from a config alone."""
    generation_config: Annotated[Literal["auto", "none"], BeforeValidator(_plain_generation_config)] = "auto"
    """auto: sampling defaults come from the model's generation_config.json; none: they do not."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Fixes the seeds of requests that bring none, given equal requests in equal order; none: they are random."""


class DeviceArgs(Config):
    """Device"""

    device: Annotated[Literal["auto", "cuda", "cpu"], Common] = "auto"
    """Where the model runs; auto: the first CUDA GPU, else the CPU."""
    dtype: Annotated[ModelDtype, Common] = "auto"
    """Number format of weights and activations; auto: the checkpoint's, or the nearest that the device is fast in."""
    num_threads: Annotated[Annotated[int, Field(ge=1, le=1024)] | Literal["auto"], Common] = "auto"
    """CPU threads; auto: the free physical cores."""
    attn_backend: Annotated[Literal["AUTO", "TRITON", "FLASHINFER", "VANILLA"], BeforeValidator(_plain_backend)] = (
        "AUTO"
    )
    """Attention implementation; AUTO: TRITON on a GPU, VANILLA on a CPU."""
    deterministic: Annotated[bool, Beta] = False
    """Equal tokens whatever the batch, chunking, cache hits and padding, at some cost in speed."""
    disable_overlap_scheduler: bool = False
    """Wait for each step's result before the next is launched."""
    cuda_graph_config: Annotated[CudaGraphConfig | None, Beta] = CudaGraphConfig.model_construct()
    """CUDA graphs; null: none."""


class LimitArgs(Config):
    """Limits"""

    max_batch_size: Annotated[Count, Common] = 256
    """Requests that may run in one step."""
    max_num_tokens: Annotated[Count, Common] = 8192
    """Tokens that may run in one step, over all requests."""
    max_seq_len: Annotated[Count | Literal["auto"], Common] = "auto"
    """Longest prompt plus output; auto: the model's, or what fits."""
    enable_chunked_prefill: bool = True
    """Run a long prompt over several steps."""
    kv_cache_config: KvCacheConfig = KvCacheConfig.model_construct()
    """The KV cache."""
    kv_connector_config: Annotated[KvCacheConnectorConfig | None, Beta] = None
    """Outside storage for KV blocks; none: there is none."""
    scheduler_config: SchedulerConfig = SchedulerConfig.model_construct()
    """The scheduler."""


class LlmArgs(ParallelArgs, DeviceArgs, LimitArgs, ModelArgs):
    """Every setting of the engine. Frozen; `ConfigError` on a bad value."""

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = TOP_LEVEL

    @field_validator("model", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        text = value if isinstance(value, str) else str(value) if value is not None else ""
        if not text.strip():
            raise ValueError("no model is named; give a folder, a .gguf file, a Hub id, or `demo`.")
        return text

    @model_validator(mode="after")
    def _a_connector_works_through_the_host(self) -> "LlmArgs":
        if self.kv_connector_config is not None and not self.kv_cache_config.host_cache_size:
            raise ValueError(
                "kv_connector_config needs kv_cache_config.host_cache_size: blocks go out and come in through host "
                "memory; give it some gigabytes (1 GiB is 1073741824)."
            )
        return self

    @model_validator(mode="after")
    def _every_running_request_decodes(self) -> "LlmArgs":
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens ({self.max_num_tokens}) must be at least max_batch_size ({self.max_batch_size}): each "
                "running request decodes one token a step; raise the first or lower the second."
            )
        return self
