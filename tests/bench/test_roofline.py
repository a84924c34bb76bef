# SPDX-License-Identifier: Apache-2.0
"""The roofline against figures worked out by hand for an 8B model on an H200."""

import pytest

from headrace.bench.model_shape import shape_of
from headrace.bench.roofline import Ceilings, Shape
from headrace.bench.shares import roofline_shares, step_split
from headrace.config.model import ModelConfig
from headrace.utils.hub import ModelSource

QWEN3_8B = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
)  # fmt: skip
H200 = Ceilings(4.3e12, {"bfloat16": 790e12, "fp8": 1450e12}, 620e12)
BF16 = Shape.of(QWEN3_8B, "bfloat16", "bfloat16")
ISL, OSL = 1024, 256
CONTEXT = ISL + OSL / 2


def test_a_step_reads_the_weights_once() -> None:
    assert BF16.weight_bytes / 1e9 == pytest.approx(15.14, abs=0.005)


@pytest.mark.parametrize(
    ("batch", "step_ms", "decode_rate", "with_prefill"),
    [
        (1, 3.56, 281, 275),
        (8, 3.84, 2085, 1809),
        (32, 4.78, 6689, 4486),
        (64, 6.05, 10_581, 5955),
        (128, 8.58, 14_924, 7121),
        (256, 15.02, 17_046, 7571),
    ],
)
def test_decode_and_the_closed_loop_in_bf16(batch: int, step_ms: float, decode_rate: int, with_prefill: int) -> None:
    step = BF16.decode(H200, batch, CONTEXT)
    assert 1e3 * step.seconds == pytest.approx(step_ms, abs=0.006)
    assert batch / step.seconds == pytest.approx(decode_rate, abs=1)
    assert BF16.closed_loop(H200, batch, ISL, OSL) == pytest.approx(with_prefill, abs=1)


@pytest.mark.parametrize(
    ("length", "ms", "rate"), [(1024, 18.8, 54_500), (2048, 38.3, 53_500), (8192, 176, 46_500), (32_768, 1087, 30_100)]
)
def test_prefill_in_bf16(length: int, ms: float, rate: int) -> None:
    prefill = BF16.prefill(H200, length)
    assert 1e3 * prefill.seconds == pytest.approx(ms, rel=0.003)
    assert length / prefill.seconds == pytest.approx(rate, rel=0.002)
    assert prefill.bound == "operations"


@pytest.mark.parametrize(
    ("batch", "step_ms", "with_prefill"), [(1, 1.92, 509), (64, 3.17, 10_999), (256, 7.91, 13_830)]
)
def test_fp8_weights_and_cache(batch: int, step_ms: float, with_prefill: int) -> None:
    shape = Shape.of(QWEN3_8B, "bfloat16", "fp8", 1.0, "fp8", head_bytes_per_weight=2.0)
    assert 1e3 * shape.decode(H200, batch, CONTEXT).seconds == pytest.approx(step_ms, abs=0.006)
    assert shape.closed_loop(H200, batch, ISL, OSL) == pytest.approx(with_prefill, abs=2)


def test_what_bounds_a_step_is_named() -> None:
    assert BF16.decode(H200, 1, CONTEXT).bound == "bytes"
    # No cache to read to speak of: past 184 rows the products are bound by their operations.
    assert BF16.decode(H200, 150, 1).bound == "bytes"
    assert BF16.decode(H200, 220, 1).bound == "operations"


def test_cached_tokens_cost_their_reading_and_not_their_products() -> None:
    whole, rest = BF16.prefill(H200, 8192), BF16.prefill(H200, 4096, 4096)
    first = BF16.prefill(H200, 4096)
    attention_of_rest = 2.0 * 4096 * (2 * 4096 + 4096) * 32 * 128 * 36 / 620e12
    products = 2.0 * 4096 * 36 * 192.94e6 / 790e12
    head = 2.0 * 4096 * 151936 / 4.3e12
    assert rest.seconds == pytest.approx(products + attention_of_rest + head, rel=1e-3)
    assert whole.seconds == pytest.approx(first.seconds + rest.seconds, rel=0.01)


def test_a_window_bounds_what_is_read_and_computed() -> None:
    values = {**QWEN3_8B.__dict__, "layer_windows": (1024,) * 36}
    windowed = Shape.of(ModelConfig(**values), "bfloat16", "bfloat16")
    assert windowed.decode(H200, 8, 32_768).bytes_read == BF16.decode(H200, 8, 1024).bytes_read
    attention = 4.0 * (1024**2 / 2 + 1024 * 1024) * 32 * 128 * 36
    plain = BF16.prefill(H200, 2048).flops - 4.0 * (2048**2 / 2) * 32 * 128 * 36
    assert windowed.prefill(H200, 2048).flops == pytest.approx(plain + attention)


def test_an_unmeasured_dtype_counts_at_the_nearest_rate() -> None:
    assert Ceilings(1.0, {"float32": 3.0, "bfloat16": 5.0}).rate("float16") == 5.0
    assert Ceilings(1.0, {"float32": 3.0}).rate("fp8") == 3.0


def test_the_caches_dtype_comes_from_its_bytes() -> None:
    source = ModelSource("hf", None, "x", "x")  # type: ignore[arg-type]
    for dtype, num_bytes in (("float32", 4), ("bfloat16", 2), ("fp8", 1), ("int8", 130 / 128)):
        shape = shape_of(QWEN3_8B, source, "bfloat16", QWEN3_8B.kv_bytes_per_token(dtype))
        assert shape.kv_bytes == num_bytes
    assert shape_of(QWEN3_8B, source, "bfloat16", None).kv_bytes == 2


def test_operations_follow_the_clock_of_the_run_and_bytes_do_not() -> None:
    measured = Ceilings(
        4e12, {"bfloat16": 600e12, "fp8": 1200e12}, 550e12,
        clock_mhz={"bfloat16": 1200.0, "attention": 1500.0}, burst_flops={"bfloat16": 800e12},
    )  # fmt: skip
    slower = measured.at_clock(1000.0)
    assert slower.read_bytes_per_s == 4e12
    assert slower.matrix_flops["bfloat16"] == pytest.approx(500e12)
    assert slower.attention_flops == pytest.approx(550e12 * 1000 / 1500)
    # A rate whose clock was not seen stays, and nothing passes what the card does in its first moment.
    assert slower.matrix_flops["fp8"] == 1200e12
    faster = measured.at_clock(1980.0)
    assert faster.matrix_flops["bfloat16"] == 800e12
    assert faster.attention_flops == pytest.approx(550e12 * 1.32)
    prompt = [BF16.prefill(ceilings, 4096).seconds for ceilings in (faster, measured, slower)]
    assert prompt == sorted(prompt) and prompt[0] < prompt[2]
    assert BF16.decode(slower, 1, 100).seconds == pytest.approx(BF16.decode(measured, 1, 100).seconds, rel=0.01)


def level(**fields: object) -> dict[str, object]:
    return {
        "mean_input_len": 1024.0, "mean_output_len": 256.0, "cache": {"share": 0.0}, "mean_in_flight": 1.0,
        "concurrency": 1, "num_requests": 8, "tpot_ms": {"mean": 4.0}, "ttft_ms": {"mean": 20.0},
        "output_tokens_per_s": 245.0, **fields,
    }  # fmt: skip


def test_the_shares_of_a_level() -> None:
    shares = roofline_shares(BF16, H200, level())
    assert shares is not None
    assert shares["decode"]["share"] == pytest.approx(3.5595 / 4.0, rel=1e-3)
    assert shares["prefill"]["share"] == pytest.approx(18.794 / 20.0, rel=1e-3)
    assert shares["closed_loop"]["share"] == pytest.approx(245 / 275.26, rel=1e-3)
    busy = roofline_shares(BF16, H200, level(concurrency=64, mean_in_flight=60.0, num_requests=256))
    assert busy is not None
    assert busy["sequences"] == 64 and busy["prefill"]["share"] is None
    few = roofline_shares(BF16, H200, level(concurrency=64, mean_in_flight=7.5))
    assert few is not None and few["sequences"] == 8
    assert roofline_shares(BF16, H200, level(mean_output_len=0.0)) is None


def test_prompt_tokens_from_the_cache_lower_what_a_prefill_must_do() -> None:
    warm = roofline_shares(BF16, H200, level(cache={"share": 0.75}))
    assert warm is not None
    assert warm["prefill"]["ideal_ms"] == pytest.approx(1e3 * BF16.prefill(H200, 256, 768).seconds)


def test_a_step_is_split_from_the_counters_around_it() -> None:
    def stats(steps: int, scale: float) -> dict[str, object]:
        times = {"front_ends": scale, "schedule": 2 * scale, "launch": scale, "wait": 5 * scale, "update": scale}
        totals = {"num_prefill_tokens": 100 * steps, "num_decode_tokens": 7 * steps, "num_preemptions": 0}
        return {"num_reconciled_steps": steps, "step_times_s": times, "totals": totals}

    split = step_split(stats(10, 1.0), stats(30, 1.2), 2.1)
    assert split is not None
    assert split["num_steps"] == 20
    assert split["wall_ms"] == pytest.approx(105)
    assert split["host_ms"] == pytest.approx(50) and split["wait_ms"] == pytest.approx(50)
    assert split["decode_tokens_per_step"] == pytest.approx(7)
    assert step_split(stats(10, 1.0), stats(10, 1.0), 1.0) is None
