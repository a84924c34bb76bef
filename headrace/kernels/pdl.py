# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits only for its results.

A kernel launched so must call `gdc_wait` in every program, before it reads what an earlier kernel wrote and before it
returns: its own end then implies theirs. `gdc_launch_dependents` lets the next kernel's programs in. Weights never
depend on an earlier kernel, so products load theirs before they wait: the gap between two kernels, and small kernels
as a whole, are hidden behind the reading of weights.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def pdl(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch: the kernel's constant PDL and, from compute capability 9.0 on, Triton's `launch_pdl`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Let the next kernel's programs in, then wait for the results of the one before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
