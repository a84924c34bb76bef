# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor, nn

from headrace.quantization.base import RawTensor
from headrace.quantization.int4_cpu import (
    FEW_ROWS,
    FEW_ROWS_INT8,
    CpuMethod,
    Int4Weight,
    Int8Weight,
    WideWeight,
    has_fast_bf16,
    has_int4,
    has_int8,
)

IN, OUT = 128, [64, 32, 32]
ROWS = [1, 3, FEW_ROWS, FEW_ROWS + 1, 40]
needs_int8 = pytest.mark.skipif(not has_int8(), reason="this CPU has no 8-bit dot products")
needs_int4 = pytest.mark.skipif(not has_int4(), reason="this CPU has no fast int4 product")
WIDE = [pytest.param(False, id="fp32")] + [pytest.param(True, id="bf16")] * has_fast_bf16()


def raw(weight: Tensor, kind: str) -> RawTensor:
    data = quantize(np.ascontiguousarray(weight.numpy()), GGMLQuantizationType[kind]).view(np.uint8)
    return RawTensor(torch.from_numpy(data), kind, tuple(weight.shape))


def parts(kinds: list[str], seed: int = 0) -> list[RawTensor]:
    generator = torch.Generator().manual_seed(seed)
    return [raw(torch.randn(n, IN, generator=generator), kind) for n, kind in zip(OUT, kinds, strict=True)]


def load(method: CpuMethod, weights: list[RawTensor] | list[Tensor]) -> nn.Module:
    layer = nn.Module()
    method.create(layer, IN, [w.shape[0] for w in weights], torch.bfloat16, torch.device("cpu"))
    for shard in reversed(range(len(weights))):
        method.load_shard(layer, weights[shard], shard)
    method.finish(layer)
    return layer


def exact(weights: list[RawTensor], x: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = torch.cat([w.dequantize() for w in weights])
    return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())


def assert_near(got: Tensor, want: Tensor) -> None:
    """Within what bf16 weights, scales and results leave."""
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.01 * want.abs().max()


@pytest.mark.parametrize("is_bf16", WIDE)
@pytest.mark.parametrize("keeps_wide", [True, False])
@pytest.mark.parametrize(
    "kinds", [["Q4_1"] * 3, ["Q4_0"] * 3, ["Q4_0", "Q4_1", "Q4_0"], ["Q4_1", "Q4_1", "Q8_0"], ["Q8_0"] * 3]
)
def test_the_product_is_that_of_the_checkpoints_numbers(kinds: list[str], keeps_wide: bool, is_bf16: bool) -> None:
    weights = parts(kinds)
    method = CpuMethod(keeps_wide=keeps_wide, is_bf16=is_bf16)
    layer = load(method, weights)
    for rows in ROWS:
        x = torch.randn(rows, IN).bfloat16()
        bias = torch.randn(sum(OUT)).bfloat16()
        assert_near(method.apply(layer, x, None), exact(weights, x))
        assert_near(method.apply(layer, x, bias), exact(weights, x, bias))


@needs_int4
def test_few_rows_use_the_4_bit_weight_and_many_the_wide_one(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for cls in (Int4Weight, WideWeight):
        monkeypatch.setattr(cls, "multiply", lambda self, x, bias, cls=cls: used.append(cls.__name__))
    method = CpuMethod()
    layer = load(method, parts(["Q4_1"] * 3))
    for rows in (FEW_ROWS, FEW_ROWS + 1):
        method.apply(layer, torch.randn(rows, IN).bfloat16(), None)
    assert used == ["Int4Weight", "WideWeight"]


@needs_int4
def test_an_8_bit_weight_is_two_4_bit_ones_for_half_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    method = CpuMethod()
    weights = [raw(torch.randn(96, IN), "Q8_0")]
    layer = load(method, weights)
    assert isinstance(method._few, Int4Weight) and method._few.max_rows == FEW_ROWS // 2
    x = torch.randn(2, IN).bfloat16()
    few = method.apply(layer, x, None)
    many = method.apply(layer, torch.cat([x, x]), None)[:2]
    assert_near(few, exact(weights, x))
    assert_near(many, exact(weights, x))


@needs_int8
def test_an_8_bit_head_multiplies_in_8_bits_and_an_outlier_costs_the_other_inputs_nothing() -> None:
    method = CpuMethod(embeds=True)
    weights = [raw(torch.randn(96, IN), "Q8_0")]
    layer = load(method, weights)
    assert isinstance(method._few, Int8Weight)
    x = torch.randn(FEW_ROWS_INT8, IN)
    x[:, 7] = 300.0
    weights[0].data.view(96, -1, 34)[:, 0, 2 + 7] = 0
    method.load_shard(layer, weights[0], 0)
    method.finish(layer)
    x = x.bfloat16()
    assert_near(method.apply(layer, x, None), exact(weights, x))
    bias = torch.randn(96).bfloat16()
    assert_near(method.apply(layer, x, bias), exact(weights, x, bias))


@needs_int4
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_4_bit_weight_unpacks_to_what_it_was_made_of(dtype: torch.dtype) -> None:
    weights = parts(["Q4_1"] * 3)
    method = CpuMethod(keeps_wide=False)
    load(method, weights)
    assert isinstance(method._few, Int4Weight)
    want = torch.cat([w.dequantize() for w in weights])
    # Scales and zeros are in bf16: 8 bits of them.
    assert (method._few.unpack(dtype).float() - want).abs().max() < 2**-7 * want.abs().max()


@pytest.mark.parametrize("is_bf16", WIDE)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_second_load_keeps_every_address_and_gives_the_new_product(kind: str, is_bf16: bool) -> None:
    method = CpuMethod(is_bf16=is_bf16)
    layer = load(method, parts([kind] * 3))

    def addresses() -> list[int]:
        wide = method._wide._weight
        assert wide is not None
        own = torch.ops.mkldnn.data_ptr(wide) if wide.is_mkldnn else wide.data_ptr()
        few = method._few
        if not isinstance(few, Int4Weight):
            return [own]
        return [own, few._packed.data_ptr(), few._scales_and_zeros.data_ptr()]

    before = addresses()
    changed = parts([kind] * 3, seed=1)
    for shard, weight in enumerate(changed):
        method.load_shard(layer, weight, shard)
    method.finish(layer)
    assert addresses() == before
    for rows in ROWS:
        x = torch.randn(rows, IN).bfloat16()
        assert_near(method.apply(layer, x, None), exact(changed, x))


@pytest.mark.parametrize("keeps_wide", [True, False])
def test_an_embedding_looks_up_rows_and_multiplies_by_them(keeps_wide: bool) -> None:
    weights = [raw(torch.randn(96, IN), "Q8_0")]
    method = CpuMethod(embeds=True, keeps_wide=keeps_wide)
    layer = load(method, weights)
    ids = torch.tensor([5, 0, 95, 5])
    assert torch.equal(method.embed(layer, ids), weights[0].dequantize()[ids].bfloat16())
    for rows in (1, 9):
        x = torch.randn(rows, IN).bfloat16()
        assert_near(method.apply(layer, x, None), exact(weights, x))


def test_dense_weights_are_taken_too() -> None:
    weights = [torch.randn(n, IN).bfloat16() for n in OUT]
    method = CpuMethod()
    layer = load(method, weights)
    x = torch.randn(7, IN).bfloat16()
    assert_near(method.apply(layer, x, None), x.float() @ torch.cat(weights).float().t())


def test_an_output_that_is_no_multiple_of_16_works() -> None:
    weights = [raw(torch.randn(37, IN), "Q4_1")]
    method = CpuMethod()
    layer = load(method, weights)
    x = torch.randn(2, IN).bfloat16()
    assert_near(method.apply(layer, x, None), exact(weights, x))


@pytest.mark.parametrize("keeps_wide", [True, False])
def test_a_4_bit_layer_that_loads_dense_weights_next_uses_these(keeps_wide: bool) -> None:
    method = CpuMethod(keeps_wide=keeps_wide)
    layer = load(method, parts(["Q4_1"] * 3))
    weights = [torch.randn(n, IN).bfloat16() for n in OUT]
    for shard, weight in enumerate(weights):
        method.load_shard(layer, weight, shard)
    method.finish(layer)
    for rows in ROWS:
        x = torch.randn(rows, IN).bfloat16()
        assert_near(method.apply(layer, x, None), x.float() @ torch.cat(weights).float().t())


@needs_int8
def test_an_8_bit_product_has_a_kernel_for_this_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    """oneDNN falls back to a reference product, hundreds of times slower, where it has none for what it is given."""
    weight = Int8Weight()
    weight.store(torch.randn(96, IN))
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        weight.multiply(torch.randn(1, IN).bfloat16(), None)
    products = [line for line in capfd.readouterr().out.splitlines() if ",exec,cpu,matmul," in line]
    assert products and not any(",ref" in line for line in products), products
