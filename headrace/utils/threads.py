# SPDX-License-Identifier: Apache-2.0
"""How many CPU threads to compute with, and the environment that keeps them from fighting their neighbours.

Compute threads meet at a barrier after every matmul. When another process takes one of their cores, all wait for the
one that lost it, and with spinning barriers a step takes 5 to 50 times as long; so a core that is in use is left alone.
"""

import math
import os
import sys
import time
from pathlib import Path

from headrace.utils.machine import CGROUP, read_text

CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
SAMPLE_S = 0.1


def choose_num_threads() -> int:
    """Physical cores that this process may use and that nothing else is using now, at least 1. Takes 0.1 s."""
    return free_cores(usable_cores(), os.cpu_count() or 1, _load(), _busy())


def free_cores(usable: int, host: int, load: float, busy: float) -> int:
    """Cores to use of `usable`, on a host of `host` logical CPUs.

    load: the one-minute load average, which lags. busy: CPUs in use over the last moment, which jumps. The smaller
    counts, so that neither work just ended nor a passing spike takes a core away.
    """
    taken = math.floor(min(load, busy) + 0.5)
    return max(1, min(usable, host - taken))


def usable_cores() -> int:
    """Physical cores in this process's affinity, no more than its cgroup's CPU quota; at least 1."""
    cpus = _affinity()
    cores = len({_core_of(cpu) for cpu in cpus})
    quota = cpu_quota()
    return max(1, min(cores, math.floor(quota) if quota else cores))


def _affinity() -> set[int]:
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cpu_quota(root: Path = CGROUP) -> float | None:
    """CPUs that the cgroup may use, as a container sees it; None for no limit."""
    words = read_text(root / "cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        return float(words[0]) / float(words[1])
    quota, period = read_text(root / "cpu/cpu.cfs_quota_us"), read_text(root / "cpu/cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def thread_environment() -> dict[str, str]:
    """Variables for a process that will import torch: threads spin briefly at barriers, then sleep. The user's own win.

    A decode step has some 150 barriers. Asleep at once, each costs a wake-up: 45 to 57 tokens/s on two quiet cores,
    with the short spin 44 to 68. libgomp's own default spins 60 times longer, and collapses where another process
    wants the core.
    """
    wanted = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "0"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _core_of(cpu: int) -> str:
    """The physical core of a logical CPU: the list of its sibling threads."""
    return read_text(CPU_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _busy() -> float:
    """CPUs in use during a short sleep of this process; 0 where the system does not say."""
    before = _cpu_times()
    time.sleep(SAMPLE_S)
    after = _cpu_times()
    if not before or not after:
        return 0.0
    idle, total = after[0] - before[0], after[1] - before[1]
    return (os.cpu_count() or 1) * (1.0 - idle / total) if total > 0 else 0.0


def _cpu_times() -> tuple[int, int] | None:
    """(idle, total) ticks of all CPUs since boot."""
    words = read_text(Path("/proc/stat")).partition("\n")[0].split()
    if len(words) < 6 or words[0] != "cpu":
        return None
    ticks = [int(word) for word in words[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
