# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch
from tiny_gguf import random_weights, write_gguf

from headrace.models.gguf import GgufStream
from headrace.quantization.base import RawTensor

ARCHITECTURES = ["llama", "qwen2", "qwen3", "smollm3", "gemma3"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_converted_model_comes_back_under_its_own_names_and_in_its_own_order(
    tmp_path: Path, architecture: str
) -> None:
    weights = random_weights(architecture, tied=False, bias=architecture in ("llama", "qwen2"))
    stream = GgufStream(write_gguf(tmp_path / "t.gguf", weights, architecture))
    found = dict(stream)
    assert set(found) == set(weights)
    for name, want in weights.items():
        got = found[name]
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6 if "norm" in name else 0, msg=name)
    assert stream.total_bytes == sum(w.nbytes for w in weights.values())
    assert stream.where("model.norm.weight") == tmp_path / "t.gguf"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_packed_matrices_stay_packed_and_their_rows_are_in_order(tmp_path: Path, kind: str) -> None:
    weights = random_weights()
    for name, got in GgufStream(write_gguf(tmp_path / "t.gguf", weights, kind=kind)):
        if weights[name].dim() == 1:
            assert isinstance(got, torch.Tensor)
            continue
        assert isinstance(got, RawTensor)
        assert (got.kind, got.shape) == (kind, tuple(weights[name].shape))
        # Half a step of 4 bits over 6 deviations of 0.2; a row in the wrong place is off by 0.2 and more.
        error = (got.dequantize() - weights[name]).abs()
        assert error.max() < 0.15 and error.mean() < 0.03, name


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_precision_matrices_are_dense(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    weights = random_weights()
    found = dict(GgufStream(write_gguf(tmp_path / "t.gguf", weights, kind=kind)))
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], weights[name].to(dtype))


def test_rope_tables_are_no_weights_and_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": torch.ones(8).numpy(), "blk.0.attn_sinks.weight": torch.ones(4).numpy()}
    names = [name for name, _ in GgufStream(write_gguf(tmp_path / "t.gguf", random_weights(), extra=extra))]
    assert "rope_freqs.weight" not in names
    assert "blk.0.attn_sinks.weight" in names
