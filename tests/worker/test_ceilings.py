# SPDX-License-Identifier: Apache-2.0
"""Ceilings are measured, on the CPU here, and every rate is there."""

import json

import pytest
import torch

from headrace.worker import ceilings


def test_the_ceilings_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "SECONDS", {"cpu": 0.02})
    monkeypatch.setattr(ceilings, "SIZES", {"cpu": 128})
    monkeypatch.setattr(ceilings, "PROMPTS", {"cpu": (2, 64, 16)})
    monkeypatch.setattr(ceilings, "BURST_S", 0.005)
    threads = torch.get_num_threads()
    try:
        values = json.loads(json.dumps(ceilings.measure("cpu", 1)))
    finally:
        torch.set_num_threads(threads)
    assert values["device"] == "cpu" and values["num_threads"] == 1
    assert set(values["matrix_flops"]) == set(values["matrix_flops_burst"]) == {"float32", "bfloat16"}
    assert values["matrix_flops"]["float32"] > 1e8 and values["attention_flops"] > 1e6
    assert set(values["windows"]) == {"float32", "bfloat16", "attention"}
    assert all(0 < start < end for start, end in values["windows"].values())
    assert 1e8 < values["read_bytes_per_s"] < 1e12
