# SPDX-License-Identifier: Apache-2.0
"""How a model is spread over devices."""

from typing import Annotated

from pydantic import model_validator

from headrace.config.base import Beta, Config, Count


class ParallelArgs(Config):
    """Parallelism"""

    tensor_parallel_size: Count = 1
    """Devices that share each layer."""
    pipeline_parallel_size: Count = 1
    """Stages that the layers are cut into."""
    context_parallel_size: Annotated[Count, Beta] = 1
    """Devices that share one long prompt."""
    moe_expert_parallel_size: Annotated[Count | None, Beta] = None
    """Devices that the experts are dealt out to."""
    moe_tensor_parallel_size: Annotated[Count | None, Beta] = None
    """Devices that share each expert."""
    enable_attention_dp: Annotated[bool, Beta] = False
    """Each device attends for its own requests."""

    @model_validator(mode="after")
    def _one_device_for_now(self) -> "ParallelArgs":
        sizes = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "moe_expert_parallel_size": self.moe_expert_parallel_size,
            "moe_tensor_parallel_size": self.moe_tensor_parallel_size,
        }
        for name, size in sizes.items():
            if size is not None and size > 1:
                raise ValueError(f"{name} ({size}) is not built yet: Headrace runs on one device; set it to 1.")
        if self.enable_attention_dp:
            raise ValueError("enable_attention_dp is not built yet: Headrace runs on one device; set it to false.")
        return self
