# SPDX-License-Identifier: Apache-2.0
"""The hardware's ceilings: measured once, found again, given by hand, or not to be had."""

import json
from pathlib import Path

import pytest

from headrace.bench import ceilings
from headrace.bench.ceilings import as_ceilings, find_ceilings, read_ceilings
from headrace.bench.hardware import GpuWatch, describe_machine, describe_software
from headrace.errors import ConfigError

VALUES = {"read_bytes_per_s": 1e10, "matrix_flops": {"bfloat16": 2e11}, "attention_flops": 1e11}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the user is told; the cache folder is empty."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return []


def measurer(tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_measurer.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ceilings, "MEASURE", "fake_measurer")


def test_they_are_measured_once_and_found_again(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer(tmp_path, f"print('noise')\nprint({json.dumps(json.dumps(VALUES))})", monkeypatch)
    first = find_ceilings("cpu", 2, said.append)
    assert first is not None and first["matrix_flops"] == {"bfloat16": 2e11}
    assert first["machine"]["device"] == "cpu" and first["measured_at"]
    assert len(said) == 1 and said[0].startswith("Measuring what this machine can do")
    (file,) = (tmp_path / "cache" / "ceilings").iterdir()
    assert "2-threads" in file.name
    measurer(tmp_path, "raise SystemExit(1)", monkeypatch)
    assert find_ceilings("cpu", 2, said.append) == first
    assert len(said) == 1
    # Another number of threads is another ceiling.
    assert find_ceilings("cpu", 3, said.append) is None


def test_a_failure_to_measure_is_one_sentence_and_no_roofline(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer(tmp_path, "raise RuntimeError('the card is full')", monkeypatch)
    assert find_ceilings("cpu", 2, said.append) is None
    assert said[-1] == "No roofline: the ceilings could not be measured: RuntimeError: the card is full."


def test_a_busy_device_is_not_measured(said: list[str]) -> None:
    assert find_ceilings("cpu", 2, said.append, may_measure=False) is None
    assert "not measured yet" in said[0]


def test_a_damaged_file_in_the_cache_is_measured_again(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer(tmp_path, f"print({json.dumps(json.dumps(VALUES))})", monkeypatch)
    find_ceilings("cpu", 2, said.append)
    (file,) = (tmp_path / "cache" / "ceilings").iterdir()
    file.write_text("{")
    assert find_ceilings("cpu", 2, said.append) is not None
    assert read_ceilings(file)["read_bytes_per_s"] == 1e10


def test_a_file_can_be_given(said: list[str], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(VALUES))
    values = find_ceilings("cuda", 1, said.append, str(path))
    assert values is not None
    known = as_ceilings(values)
    assert (known.read_bytes_per_s, known.rate("bfloat16"), known.attention_flops) == (1e10, 2e11, 1e11)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no file of ceilings: it lacks read_bytes_per_s or matrix_flops"):
        find_ceilings("cuda", 1, said.append, str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        find_ceilings("cuda", 1, said.append, "/no/such")


NVIDIA_SMI = """#!/bin/sh
case "$*" in
*name*) echo "NVIDIA H200, 580.1, 143771, 700.00, 1980" ;;
*) echo "1980, 3201, 120.5, 30"; echo "1410, 3201, [N/A], 31"; echo "1500, 3201, 699.5, 40"; exec sleep 60 ;;
esac
"""


def test_a_gpus_clocks_are_seen_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    machine = describe_machine("cuda")
    assert (machine["name"], machine["driver"], machine["max_clock_mhz"]) == ("NVIDIA H200", "580.1", 1980)
    with GpuWatch(True) as watch:
        while len(watch.samples) < 2:
            pass
    seen = watch.summary()
    assert seen is not None
    # The sample with a figure missing is passed over.
    assert seen["sm_clock_mhz"] == {"min": 1500, "mean": 1740, "max": 1980}
    assert seen["power_w"]["max"] == 699.5
    first, second = (at for at, _ in watch.samples)
    assert watch.clock_between(first, second) == 1740
    assert watch.clock_between(second + 1, second + 2) is None
    assert watch.summary(watch.mark()) is None


def test_ceilings_of_a_gpu_are_kept_with_their_clocks_and_old_ones_measured_again(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    body = (
        "import json, time\nbegun = time.monotonic()\ntime.sleep(1)\n"
        f"values = {VALUES!r} | {{'windows': {{'bfloat16': [begun - 5, time.monotonic()], 'attention': [0, 1]}}}}\n"
        "print(json.dumps(values))"
    )
    measurer(tmp_path, body, monkeypatch)
    values = find_ceilings("cuda", 1, said.append)
    assert values is not None and values["clock_mhz"] == {"bfloat16": 1740} and "windows" not in values
    (file,) = (tmp_path / "cache" / "ceilings").iterdir()
    file.write_text(json.dumps(VALUES))
    assert find_ceilings("cuda", 1, said.append, may_measure=False) == VALUES
    assert find_ceilings("cuda", 1, said.append) != VALUES
    assert sum("Measuring" in text for text in said) == 2


def test_without_a_gpu_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    with GpuWatch(True) as watch, GpuWatch(False) as off:
        pass
    assert watch.summary() is None and off.summary() is None
    assert describe_machine("cuda")["name"]


def test_a_report_says_which_software_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "0123abc")
    assert describe_software()["commit"] == "0123abc"
    monkeypatch.delenv("COMMIT")
    software = describe_software()
    assert software["commit"] != "0123abc"
    assert {"python", "headrace", "torch"} <= set(software["versions"])
    assert len(software["load_average"]) == 3
