# SPDX-License-Identifier: Apache-2.0
"""How a step is carried out on the device."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from headrace.config.base import Beta, Config, Count, Prototype


class CudaGraphConfig(Config):
    """CUDA graphs"""

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {"mode": ("decode",)}

    batch_sizes: Annotated[list[Count] | None, Beta] = None
    """Batch sizes to capture; none: chosen from `max_batch_size`."""
    max_batch_size: Annotated[int, Field(ge=0), Beta] = 0
    """Largest batch to capture; 0: chosen."""
    enable_padding: Annotated[bool, Beta] = True
    """A batch between two captured sizes runs in the larger."""
    mixed_num_tokens: Annotated[list[Count] | None, Prototype] = None
    """Token counts to capture for steps with prefill; none: chosen, up to 1,024; empty: such steps are not captured."""
