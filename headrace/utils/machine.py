# SPDX-License-Identifier: Apache-2.0
"""What this machine is made of, found without torch: for commands that load no model."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU, as the driver describes it."""

    name: str
    total_memory: int
    """Bytes."""
    capability: tuple[int, int]


def nvidia_gpus(timeout_s: float = 10.0) -> list[Gpu]:
    """The GPUs that nvidia-smi lists; empty where there is no driver, or CUDA_VISIBLE_DEVICES hides them all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_nvidia_smi(done.stdout) if done.returncode == 0 else []


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """Lines of `name, MiB, major.minor`; a line of another shape is passed over."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 2)]
        numbers = parts[-1].split(".")
        if len(parts) == 3 and parts[1].isdecimal() and len(numbers) == 2 and all(n.isdecimal() for n in numbers):
            found.append(Gpu(parts[0], int(parts[1]) << 20, (int(numbers[0]), int(numbers[1]))))
    return found


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; empty where it is not said."""
    for line in read_text(cpuinfo).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware."""
    for line in read_text(cpuinfo).splitlines():
        if line.lower().startswith(("flags", "features")):
            return not BF16_FLAGS.isdisjoint(line.split())
    return False


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Bytes this process can still take without swapping: the machine's, or what its cgroup leaves; 0 if not known."""
    free = 0
    for line in read_text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = read_text(cgroup / "memory.max").strip(), read_text(cgroup / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        left = max(int(limit) - int(used), 0)
        return min(free, left) if free else left
    return free


def read_text(path: Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
