# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from headrace.errors import ModelLoadError
from headrace.quantization.base import CHUNK_VALUES, RawTensor, copy_weight
from headrace.quantization.gguf import affine4, affine8, bytes_per_row, unpack

KINDS = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
]  # fmt: skip
COLUMNS = 512


def packed(kind: str, rows: int = 4) -> np.ndarray:
    """Random bytes of a type, every half-precision field of a block finite."""
    generator = np.random.default_rng(0)
    if kind in ("F32", "F16", "BF16"):
        values = generator.standard_normal((rows, COLUMNS), dtype=np.float32)
        return quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    data = generator.integers(0, 256, (rows, bytes_per_row(kind, COLUMNS)), dtype=np.uint8)
    # A cleared bit 6 in every byte keeps any fp16 exponent below its largest, which means infinity.
    return data & 0b10111111


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_unpacks_as_the_gguf_package_does(kind: str) -> None:
    data = packed(kind)
    want = dequantize(data, GGMLQuantizationType[kind])
    got = unpack(torch.from_numpy(data), kind)
    assert got.dtype == torch.float32
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_be_picked_while_packed(kind: str) -> None:
    data = torch.from_numpy(packed(kind))
    whole = RawTensor(data, kind, (4, COLUMNS))
    order = torch.tensor([2, 0, 3])
    assert whole.rows(order).shape == (3, COLUMNS)
    assert torch.equal(whole.rows(order).dequantize(), whole.dequantize()[order])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_affine_types_say_their_own_numbers(kind: str) -> None:
    data = torch.from_numpy(packed(kind))
    affine = affine4(data, kind)
    assert affine is not None
    assert affine.q.shape == (4, COLUMNS) and int(affine.q.max()) <= 15
    values = affine.q.view(4, -1, 32) * affine.scale.unsqueeze(-1) + affine.offset.unsqueeze(-1)
    assert torch.equal(values.view(4, -1), unpack(data, kind))


def test_q8_0_is_the_sum_of_two_affine_halves() -> None:
    data = torch.from_numpy(packed("Q8_0"))
    halves = affine8(data)
    assert halves.q.shape == (4, 2 * COLUMNS) and int(halves.q.max()) <= 15
    values = halves.q.view(4, -1, 32) * halves.scale.unsqueeze(-1) + halves.offset.unsqueeze(-1)
    high, low = values.view(4, -1).chunk(2, dim=1)
    torch.testing.assert_close(high + low, unpack(data, "Q8_0"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q6_K", "IQ4_NL"])
def test_other_types_are_not_affine(kind: str) -> None:
    assert affine4(torch.from_numpy(packed(kind)), kind) is None


def test_a_large_tensor_unpacks_piece_by_piece() -> None:
    rows = CHUNK_VALUES // COLUMNS + 3
    raw = RawTensor(torch.from_numpy(packed("Q4_1", rows)), "Q4_1", (rows, COLUMNS))
    target = torch.empty(rows, COLUMNS, dtype=torch.bfloat16)
    copy_weight(target, raw)
    assert torch.equal(target, raw.dequantize().bfloat16())


def test_a_type_that_cannot_be_unpacked_is_named() -> None:
    with pytest.raises(ModelLoadError, match="Q8_K"):
        unpack(torch.zeros(1, 292, dtype=torch.uint8), "Q8_K")
