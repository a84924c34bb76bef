# SPDX-License-Identifier: Apache-2.0
"""What is read off the machine without torch: cores, memory, GPUs."""

import os
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.utils.lazy import require
from headrace.utils.machine import Gpu, available_memory, cpu_has_bf16, parse_nvidia_smi
from headrace.utils.math import cdiv, round_down, round_up
from headrace.utils.threads import choose_num_threads, cpu_quota, free_cores, thread_environment, usable_cores


@pytest.mark.parametrize(
    ("usable", "host", "load", "busy", "expected"),
    [
        (2, 2, 0.1, 0.0, 2),
        (2, 2, 1.2, 1.0, 1),
        (2, 2, 9.0, 2.0, 1),
        (2, 2, 3.0, 0.1, 2),  # work that has just ended
        (2, 2, 0.1, 2.0, 2),  # a passing spike
        (4, 128, 40.0, 40.0, 4),  # a container on a busy host that has room
        (64, 64, 3.4, 3.2, 61),
        (1, 1, 5.0, 1.0, 1),
    ],
)
def test_cores_in_use_are_left_alone(usable: int, host: int, load: float, busy: float, expected: int) -> None:
    assert free_cores(usable, host, load, busy) == expected


def test_this_machine_has_cores() -> None:
    assert 1 <= choose_num_threads() <= usable_cores() <= (os.cpu_count() or 1)


def test_a_container_quota_is_read(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_threads_sleep_at_barriers_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert thread_environment()["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "OMP_WAIT_POLICY" not in thread_environment()


def test_memory_is_the_machines_or_what_the_container_leaves(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 4000 kB\nMemAvailable: 1000 kB\n")
    assert available_memory(info, tmp_path) == 1000 << 10
    (tmp_path / "memory.max").write_text("600000")
    (tmp_path / "memory.current").write_text("100000")
    assert available_memory(info, tmp_path) == 500000
    assert available_memory(tmp_path / "none", tmp_path / "none") == 0


def test_gpus_are_read_from_the_driver() -> None:
    text = "NVIDIA H200, 143771, 9.0\nOdd, name, 8192, 8.6\n[Insufficient Permissions]\n"
    assert parse_nvidia_smi(text) == [Gpu("NVIDIA H200", 143771 << 20, (9, 0)), Gpu("Odd, name", 8192 << 20, (8, 6))]


def test_bfloat16_units_are_read(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu avx2 avx512f\n")
    assert not cpu_has_bf16(info)
    info.write_text("flags\t\t: fpu avx2 avx512_bf16 amx_bf16\n")
    assert cpu_has_bf16(info)


def test_whole_number_arithmetic() -> None:
    assert [cdiv(7, 4), cdiv(8, 4), round_up(5, 4), round_down(7, 4)] == [2, 2, 8, 4]


def test_a_missing_library_is_answered_with_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"Grammars needs nosuchlib, .* pip install 'headrace\[grammar\]'"):
        require("nosuchlib", extra="grammar", purpose="Grammars")
    assert require("json").loads("1") == 1
