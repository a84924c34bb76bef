# SPDX-License-Identifier: Apache-2.0
"""LLM inference for NVIDIA GPUs in Python, and for CPUs: `from headrace import LLM, SamplingParams`.

The names below are imported when first used, so that `import headrace` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config.cache import KvCacheConfig
    from headrace.config.execution import CudaGraphConfig
    from headrace.config.kv_connector import KvCacheConnectorConfig
    from headrace.config.llm_args import LlmArgs
    from headrace.config.scheduler import SchedulerConfig
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.llm import LLM
    from headrace.errors import HeadraceError
    from headrace.kv_cache_retention import KvCacheRetentionConfig
    from headrace.outputs import CompletionOutput, Logprob, RequestOutput
    from headrace.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "CudaGraphConfig",
    "HeadraceError",
    "KvCacheConfig",
    "KvCacheConnectorConfig",
    "KvCacheRetentionConfig",
    "LlmArgs",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "__version__",
]

_HOME = {
    "LLM": "headrace.engine.llm",
    "AsyncLLM": "headrace.engine.async_llm",
    "LlmArgs": "headrace.config.llm_args",
    "KvCacheConfig": "headrace.config.cache",
    "KvCacheConnectorConfig": "headrace.config.kv_connector",
    "KvCacheRetentionConfig": "headrace.kv_cache_retention",
    "CudaGraphConfig": "headrace.config.execution",
    "SchedulerConfig": "headrace.config.scheduler",
    "SamplingParams": "headrace.sampling_params",
    "RequestOutput": "headrace.outputs",
    "CompletionOutput": "headrace.outputs",
    "Logprob": "headrace.outputs",
    "HeadraceError": "headrace.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = globals()[name] = vars(importlib.import_module(_HOME[name]))[name]
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
