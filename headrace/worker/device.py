# SPDX-License-Identifier: Apache-2.0
"""The device as found: its facts, and memory that costs nothing until it is written."""

import ctypes
import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from headrace.config.resolve import DeviceFacts
from headrace.errors import ConfigError
from headrace.utils.machine import available_memory, cpu_has_bf16, cpu_name
from headrace.utils.threads import choose_num_threads

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc refuses more."""
_NEVER = 2**31 - 1


def device_facts(device: str) -> DeviceFacts:
    """What `device` ("auto", "cuda", "cpu") is here; ConfigError if there is no such device."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU or driver was found"
        raise ConfigError(f"device is cuda, but {why}: use `--device cpu`, or auto.", param="device")
    if device == "cpu" or not has_gpu:
        return DeviceFacts("cpu", cpu_name(), available_memory(), None, choose_num_threads(), cpu_has_bf16())
    gpu = torch.cuda.get_device_properties(0)
    capability = (gpu.major, gpu.minor)
    return DeviceFacts("cuda", gpu.name, gpu.total_memory, capability, choose_num_threads(), capability >= (8, 0))


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU a page takes no memory before it is written (torch.zeros would write them all)."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


def keep_freed_memory() -> None:
    """Have glibc keep what torch frees: giving large buffers back makes each step fault its pages in anew."""
    if "libc.so.6" not in _read("/proc/self/maps"):
        return
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """Have glibc give the system what was freed and lies between what is not."""
    if "libc.so.6" in _read("/proc/self/maps"):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
