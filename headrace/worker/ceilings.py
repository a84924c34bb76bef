# SPDX-License-Identifier: Apache-2.0
"""What this machine's device can do at most: `python -m headrace.worker.ceilings cuda|cpu NUM_THREADS` prints JSON.

A process of its own, before an engine takes the memory. Rates are sustained: each is measured over a second or so,
since a card that is limited by its power slows down within that time. Takes about 10 s on a GPU, 2 s on a CPU.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.kernels.read import PIECE, read_sums
from headrace.utils.machine import available_memory

GPU_READ_BYTES = 8 << 30
CPU_READ_BYTES = 512 << 20
SIZES = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices."""
PROMPTS = {"cuda": (32, 8192, 128), "cpu": (8, 1024, 64)}
"""Heads, tokens and head width of the attention."""
SECONDS = {"cuda": 2.0, "cpu": 0.4}
BURST_S = 0.05
"""The first moment of a measurement, before a card heats up."""

Measured = dict[str, float]
Window = tuple[float, float]
"""From when to when, by `time.monotonic`, a rate was sustained: whoever watches the clocks knows then which it was."""


def measure(device: str, num_threads: int) -> dict[str, Any]:
    """Bytes and operations per second, and what they were measured on."""
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(num_threads)
    windows: dict[str, Window] = {}
    rates: dict[str, Measured] = {}
    for dtype in ("float32", "bfloat16") if device == "cpu" else ("bfloat16",):
        rates[dtype] = _product(device, dtype)
        windows[dtype] = _window(rates[dtype])
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        rates["fp8"] = _product_fp8()
        windows["fp8"] = _window(rates["fp8"])
    attention = _attention(device)
    windows["attention"] = _window(attention)
    return {
        "device": device,
        "torch": torch.__version__,
        "num_threads": num_threads if device == "cpu" else None,
        "read_bytes_per_s": _read(device),
        "matrix_flops": {dtype: rate["sustained"] for dtype, rate in rates.items()},
        "matrix_flops_burst": {dtype: rate["burst"] for dtype, rate in rates.items()},
        "attention_flops": attention["sustained"],
        "windows": windows,
    }


def _rate(device: str, amount: float, run: Callable[[], object], share: float = 1.0) -> Measured:
    """`amount` of work per second of a call: at the beginning, and over the second half of the time.

    share: of the usual time, for what power limits less than products.
    """
    run()
    sync = torch.cuda.synchronize if device == "cuda" else _nothing
    sync()
    burst, begun = _repeat(BURST_S, run, sync), time.perf_counter()
    seconds = SECONDS[device] * share
    # On the way to its sustained clock.
    _repeat(seconds / 2, run, sync)
    start = time.monotonic()
    sustained = _repeat(max(seconds - (time.perf_counter() - begun), seconds / 2), run, sync)
    return {"burst": amount / burst, "sustained": amount / sustained, "start": start, "end": time.monotonic()}


def _window(rate: Measured) -> Window:
    return rate["start"], rate["end"]


def _repeat(seconds: float, run: Callable[[], object], sync: Callable[[], None]) -> float:
    """Seconds of one call, over as many as fill the time."""
    begun, count = time.perf_counter(), 0
    while True:
        # Launched in groups, so that the host is ahead.
        for _ in range(4):
            run()
        count += 4
        sync()
        elapsed = time.perf_counter() - begun
        if elapsed >= seconds:
            return elapsed / count


def _nothing() -> None:
    """A CPU is done when the call returns."""


def _product(device: str, dtype: str) -> Measured:
    size = SIZES[device]
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    out = torch.empty_like(a)
    return _rate(device, 2.0 * size**3, lambda: torch.mm(a, b, out=out))


def _product_fp8() -> Measured:
    size = SIZES["cuda"]
    a = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")

    def run() -> Tensor:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return _rate("cuda", 2.0 * size**3, run)


def _attention(device: str) -> Measured:
    """Causal attention over a long prompt, by the fastest that torch has."""
    heads, tokens, width = PROMPTS[device]
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, heads, tokens, width, device=device, dtype=kind) for _ in range(3))
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if device == "cuda" else []

    def run() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    amount, best = 2.0 * heads * tokens**2 * width, {"sustained": 0.0, "start": 0.0, "end": 0.0}
    if not backends:
        return _rate(device, amount, run)
    for backend in backends:
        with sdpa_kernel(backend):
            try:
                best = max(best, _rate(device, amount, run, 0.5), key=lambda rate: rate["sustained"])
            except RuntimeError:
                # Not built into this torch, or not for this card.
                continue
    return best


def _read(device: str) -> float:
    """Bytes per second of reading far more than the caches hold."""
    if device == "cpu":
        num_bytes = min(CPU_READ_BYTES, available_memory() // 4)
        x = torch.rand(num_bytes // 4 // PIECE * PIECE)
        return _rate(device, x.nbytes, x.sum)["sustained"]
    free = torch.cuda.mem_get_info()[0]
    x = torch.empty(min(GPU_READ_BYTES, free // 2) // 4 // PIECE * PIECE, device=device).normal_()
    read = read_sums.choose(device)
    return max(_rate(device, x.nbytes, run, 0.25)["sustained"] for run in (lambda: read(x), x.sum))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.stdout.write(json.dumps(measure(sys.argv[1], int(sys.argv[2]))) + "\n")
