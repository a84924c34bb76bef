# SPDX-License-Identifier: Apache-2.0
"""The demo's default path on a CPU (4-bit weights, bf16) stays near the same file in fp32."""

from benchmarks.engine.demo_distance import kl_to_fp32

MAX_MEAN_KL = 0.01
"""In nats, over the whole vocabulary; 0.0011 is usual."""


def test_the_default_path_stays_near_fp32(demo_model: str) -> None:
    found = kl_to_fp32(demo_model)
    for way, distances in found.items():
        mean = float(distances.mean())
        assert 300 <= len(distances) <= 400
        assert mean < MAX_MEAN_KL, f"{way}: mean KL {mean:.4f}"
