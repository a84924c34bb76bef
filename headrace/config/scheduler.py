# SPDX-License-Identifier: Apache-2.0
"""Which requests run in a step."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headrace.config.base import Beta, Config, Count


class SchedulerConfig(Config):
    """Scheduling"""

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context_chunking_policy": ("FIRST_COME_FIRST_SERVED",),
        "dynamic_batch_config": (),
        "use_python_scheduler": (True, False),
        "enable_prefix_aware_scheduling": (True, False),
    }

    capacity_scheduler_policy: Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"] = "MAX_UTILIZATION"
    """MAX_UTILIZATION admits while blocks last and preempts the cheapest request when they run out;
    GUARANTEED_NO_EVICT admits a request only with room for its longest possible output; STATIC_BATCH does so too, and
    admits none until the whole batch has ended."""
    max_prefill_tokens: Count | Literal["auto"] = "auto"
    """Prompt tokens in a step that also decodes, so that long prompts do not stall streams; auto: on a GPU 960 to 2048,
    by the decodes and the waiting prompts, on a CPU 256."""
    watermark: Annotated[float, Field(ge=0.0, le=0.5), Beta] = 0.01
    """Share of the blocks kept free when a request is admitted, for those that run to grow into."""
    waiting_queue_policy: Literal["priority", "fcfs"] = "priority"
    """Order of the waiting requests: the larger `priority` (0 to 100) first, each level worth a second of waiting, so
    that nobody waits forever; or first come first served, whatever the priority. The same where no request has one."""
