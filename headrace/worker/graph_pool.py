# SPDX-License-Identifier: Apache-2.0
"""Captures calls as CUDA graphs in one memory pool that all of them share, and knows what they take."""

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Run it again, on what then lies at its addresses."""
        ...


class GraphPool:
    """The graphs of one worker."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0
        """Of the device, taken by all captures so far: their shared memory and what the driver keeps of each."""

    def capture(self, call: Callable[[], None]) -> Graph:
        """Capture a call that has run once before.

        Raises:
            RuntimeError: it cannot be captured, the memory for it being short for instance; nothing of it is left.
        """
        stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        # What steps have freed must not count as taken.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread must do nothing meanwhile that cannot be captured: others copy KV blocks and pin memory.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                call()
        except RuntimeError:
            # A capture that breaks may end on its own stream.
            torch.cuda.set_stream(stream)
            del graph
            # Raises where not the capture but the device is lost.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            raise
        self.num_bytes += max(0, free - torch.cuda.mem_get_info()[0])
        return graph
