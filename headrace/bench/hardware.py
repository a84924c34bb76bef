# SPDX-License-Identifier: Apache-2.0
"""Where figures come from: the machine, its clocks while it works, the versions, the commit, the command line."""

import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headrace
from headrace.utils.machine import cpu_name

GPU_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
WATCH_MS = 500
SM_CLOCK = "sm_clock_mhz"
PACKAGES = ("torch", "triton", "transformers")


def output_of(*command: str, cwd: Path | None = None) -> str:
    """What a command says; empty where it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe_machine(device: str) -> dict[str, Any]:
    """The device's name and what drives it. device: cuda or cpu."""
    facts: dict[str, Any] = {"device": device, "cpu": cpu_name(), "num_cpus": os.cpu_count()}
    if device == "cuda":
        query = "name,driver_version,memory.total,power.limit,clocks.max.sm"
        line = output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits").partition("\n")[0]
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5:
            facts |= {
                "gpu": parts[0],
                "driver": parts[1],
                "memory_mib": _number(parts[2]),
                "power_limit_w": _number(parts[3]),
                "max_clock_mhz": _number(parts[4]),
            }
    facts["name"] = facts.get("gpu") or facts["cpu"] or platform.machine()
    return facts


def describe_software() -> dict[str, Any]:
    """Versions, and the commit: what COMMIT says, else that of the checkout that Headrace runs from."""
    named = os.environ.get("COMMIT")
    root = Path(headrace.__file__).parent.parent
    commit = output_of("git", "rev-parse", "HEAD", cwd=root) if not named and (root / ".git").exists() else ""
    is_changed = bool(commit and output_of("git", "status", "--porcelain", "--untracked-files=no", cwd=root))
    versions = {"python": platform.python_version(), "headrace": headrace.__version__}
    return {
        "versions": versions | {name: version for name in PACKAGES if (version := version_of(name))},
        "commit": named or (commit + ("+changes" if is_changed else "")) or None,
        "command": shlex.join(["headrace", *sys.argv[1:]]),
        "load_average": list(os.getloadavg()),
    }


def version_of(package: str) -> str | None:
    """An installed package's version, found without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass
class GpuWatch:
    """Reads a GPU's clocks, power and temperature while it is entered; nothing where there is none."""

    is_on: bool
    every_ms: int = WATCH_MS
    samples: list[tuple[float, tuple[float, ...]]] = field(default_factory=list)
    """When each was read, by `time.monotonic`, and the figures of GPU_QUERY."""
    _process: "subprocess.Popen[str] | None" = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> "GpuWatch":
        if self.is_on:
            command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits", "-i", "0"]
            try:
                self._process = subprocess.Popen(
                    [*command, f"--loop-ms={self.every_ms}"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            except OSError:
                return self
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None and self._thread is not None:
            self._process.terminate()
            self._thread.join()
            # Waits, and closes the pipe.
            self._process.communicate()

    def mark(self) -> int:
        """A place in the samples, for `summary`."""
        return len(self.samples)

    def summary(self, since: int = 0) -> dict[str, Any] | None:
        """Clocks in MHz, power in W, temperature in °C, since a mark; None where nothing was seen."""
        samples = self.samples[since:]
        if not samples:
            return None
        names = (SM_CLOCK, "memory_clock_mhz", "power_w", "temperature_c")
        columns = zip(names, zip(*(figures for _, figures in samples), strict=True), strict=True)
        return {
            name: {"min": min(values), "mean": statistics.fmean(values), "max": max(values)} for name, values in columns
        }

    def clock_between(self, start: float, end: float) -> float | None:
        """Mean clock of the multiprocessors in MHz, over the samples of a time; None where there is none."""
        seen = [figures[0] for at, figures in self.samples if start <= at <= end]
        return statistics.fmean(seen) if seen else None

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            values = [_number(part) for part in line.split(",")]
            if len(values) == 4 and all(value is not None for value in values):
                self.samples.append((time.monotonic(), tuple(value for value in values if value is not None)))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
