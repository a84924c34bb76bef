# SPDX-License-Identifier: Apache-2.0
"""The hardware's ceilings: measured once on this machine, kept in the cache folder, read again from there."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.bench.hardware import GpuWatch, describe_machine, version_of
from headrace.bench.roofline import Ceilings
from headrace.errors import ConfigError
from headrace.utils.cache import cache_dir, kernel_cache
from headrace.utils.threads import thread_environment

Say = Callable[[str], None]
MEASURE = "headrace.worker.ceilings"
TIMEOUT_S = 180.0
CLOCK_MS = 100
"""Between two looks at the clocks while ceilings are measured: a rate is sustained for half a second or a whole one."""
RATES = ("read_bytes_per_s", "matrix_flops")


def cache_file(machine: dict[str, Any], num_threads: int) -> Path:
    """Where the ceilings of a machine are kept: a file for each card and driver, or CPU and number of threads."""
    what = machine.get("driver") or f"{num_threads} threads"
    words = f"{machine['name']} {what} torch {version_of('torch')}"
    return cache_dir() / "ceilings" / f"{re.sub(r'[^A-Za-z0-9.+]+', '-', words).strip('-')}.json"


def find_ceilings(
    device: str, num_threads: int, say: Say, given: str | None = None, may_measure: bool = True
) -> dict[str, Any] | None:
    """The ceilings as a report holds them; None where they cannot be had, which `say` is told.

    Args:
        device: cuda or cpu.
        num_threads: of a CPU.
        say: shows the user a sentence.
        given: a file that holds them.
        may_measure: the device is free to be measured now.

    Raises:
        ConfigError: the given file does not hold them.
    """
    if given is not None:
        return read_ceilings(Path(given))
    machine = describe_machine(device)
    path = cache_file(machine, num_threads)
    if path.is_file():
        try:
            kept = read_ceilings(path)
            # Those of an earlier version say nothing of the clocks they were measured at.
            if device != "cuda" or not may_measure or "clock_mhz" in kept:
                return kept
        except ConfigError as error:
            say(error.message)
    if not may_measure:
        say("No roofline: this machine's ceilings are not measured yet; `headrace bench throughput` does so.")
        return None
    values = _measure(device, num_threads, say)
    if values is None:
        return None
    values |= {"machine": machine, "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        say(f"The ceilings are not kept: {path} cannot be written ({error.strerror}).")
    return values


def read_ceilings(path: Path) -> dict[str, Any]:
    """A file of ceilings. Raises ConfigError for one that is none."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The file of ceilings {path} cannot be read: {error}.", param="ceilings") from None
    if not isinstance(values, dict) or not all(values.get(name) for name in RATES):
        raise ConfigError(f"{path} is no file of ceilings: it lacks {' or '.join(RATES)}.", param="ceilings")
    return values


def as_ceilings(values: dict[str, Any]) -> Ceilings:
    """What the roofline is reckoned with."""
    return Ceilings(
        values["read_bytes_per_s"],
        dict(values["matrix_flops"]),
        values.get("attention_flops"),
        values.get("clock_mhz") or {},
        values.get("matrix_flops_burst") or {},
    )


def _measure(device: str, num_threads: int, say: Say) -> dict[str, Any] | None:
    say("Measuring what this machine can do at most; this is done once and takes some seconds.")
    command = [sys.executable, "-m", MEASURE, device, str(num_threads)]
    with GpuWatch(device == "cuda", every_ms=CLOCK_MS) as watch, tempfile.TemporaryDirectory() as folder:
        environment = _environment()
        if device == "cuda":
            environment |= kernel_cache(environment, Path(folder)).environment
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"No roofline: the ceilings could not be measured: {error}.")
            return None
    try:
        values: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        say(f"No roofline: the ceilings could not be measured: {last}.")
        return None
    clocks = {name: watch.clock_between(*window) for name, window in (values.pop("windows", None) or {}).items()}
    known = {name: clock for name, clock in clocks.items() if clock is not None}
    return values | {"clocks": watch.summary(), "clock_mhz": known}


def _environment() -> dict[str, str]:
    """That of the process, set for compute threads; headrace is found from wherever this one was."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | thread_environment() | {"PYTHONPATH": path}
