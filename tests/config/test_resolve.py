# SPDX-License-Identifier: Apache-2.0
"""`resolve` settles every number, says why, and clamps nothing that was asked for."""

from typing import Any

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.config.resolve import DeviceFacts, ResolvedConfig, resolve
from headrace.errors import ConfigError

CPU = DeviceFacts("cpu", "a processor", 16 << 30, None, 4)
GPU = DeviceFacts("cuda", "a GPU", 80 << 30, (9, 0), 8)
OLD_GPU = DeviceFacts("cuda", "an old GPU", 16 << 30, (7, 5), 8)


def model(**changes: Any) -> ModelConfig:
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    return ModelConfig.from_hf({**hf, **changes})


def settle(device: DeviceFacts, cfg: ModelConfig | None = None, /, **settings: Any) -> ResolvedConfig:
    return resolve(LlmArgs(model="m", **settings), cfg or model(), device)


def test_defaults_on_a_cpu() -> None:
    r = settle(CPU)
    assert (r.device, r.kv_dtype, r.attn_backend, r.max_prefill_tokens, r.num_threads) == (
        "cpu",
        "float32",
        "AUTO",
        256,
        4,
    )
    assert (r.max_seq_len, r.max_batch_size, r.max_num_tokens, r.num_plans_in_flight) == (4096, 256, 8192, 2)
    assert r.notes == ()


def test_defaults_on_a_gpu() -> None:
    r = settle(GPU)
    assert (r.dtype, r.kv_dtype, r.attn_backend, r.max_prefill_tokens) == ("bfloat16", "bfloat16", "AUTO", 2048)
    assert r.origin["attn_backend"].startswith("auto: ")


@pytest.mark.parametrize(
    ("device", "own", "dtype"),
    [
        (CPU, "bfloat16", "bfloat16"),
        (CPU, "float32", "float32"),
        (CPU, None, "bfloat16"),
        (DeviceFacts("cpu", has_bf16=False), "bfloat16", "float32"),
        (GPU, "float16", "float16"),
        (GPU, "float32", "bfloat16"),
        (OLD_GPU, "bfloat16", "float16"),
    ],
)
def test_auto_dtype_is_what_the_device_is_fast_in(device: DeviceFacts, own: str | None, dtype: str) -> None:
    r = settle(device, model(torch_dtype=own))
    assert r.dtype == dtype
    assert r.origin["dtype"].startswith("auto: ")


def test_a_lowered_precision_is_said() -> None:
    assert "float32" in settle(GPU, model(torch_dtype="float32")).notes[0]
    assert settle(GPU, model(torch_dtype="float32"), dtype="float32").dtype == "float32"


def test_packed_weights_are_multiplied_in_bfloat16_on_any_cpu() -> None:
    packed = model(quantization_config={"quant_method": "gguf"}, torch_dtype=None)
    assert settle(DeviceFacts("cpu", has_bf16=False), packed).dtype == "bfloat16"


def test_auto_length_shrinks_to_what_fits_and_says_so() -> None:
    long = model(max_position_embeddings=1 << 20)
    r = settle(DeviceFacts("cpu", "", 2 << 30), long)
    assert 256 <= r.max_seq_len < 1 << 20 and r.max_seq_len % 32 == 0
    assert "max_seq_len is" in r.notes[0]
    assert r.max_seq_len * long.kv_bytes_per_token("float32") < 2 << 30
    assert settle(DeviceFacts("cpu"), long).max_seq_len == 1 << 20, "without a known memory, the model's"


def test_an_explicit_length_is_kept_or_refused_never_changed() -> None:
    assert settle(DeviceFacts("cpu", "", 1 << 28), max_seq_len=4096).max_seq_len == 4096
    with pytest.raises(ConfigError, match=r"max_seq_len \(4097\) is more than the model's positions allow \(4096\)"):
        settle(CPU, max_seq_len=4097)


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (CPU, {"device": "cuda"}, "device = cuda is not possible here: only cpu"),
        (CPU, {"attn_backend": "TRITON"}, "attn_backend = TRITON needs a GPU"),
        (GPU, {"attn_backend": "flashinfer"}, "attn_backend = FLASHINFER is not built yet"),
    ],
)
def test_what_cannot_be_is_refused(device: DeviceFacts, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        settle(device, **settings)
    assert caught.value.param in ("device", "attn_backend")


def test_the_plain_loop_has_one_plan_in_flight() -> None:
    assert settle(CPU, disable_overlap_scheduler=True).num_plans_in_flight == 1


def test_origins_name_every_setting_and_survive_the_way_to_the_core() -> None:
    args = LlmArgs(model="m", max_batch_size=4, kv_cache_config={"dtype": "float32"})
    for there in (args, LlmArgs.model_validate_json(args.model_dump_json())):
        origin = resolve(there, model(), CPU).origin
        assert origin["max_batch_size"] == origin["kv_cache_config.dtype"] == origin["model"] == "argument"
        assert origin["max_num_tokens"] == "default"
        assert origin["max_seq_len"] == "auto: the model's"
        assert not resolve(there, model(), CPU).notes
    assert resolve(args, model(), CPU, {"max_batch_size": "yaml"}).origin["max_batch_size"] == "yaml"


def test_a_setting_without_effect_yet_is_said() -> None:
    assert "trust_remote_code has no effect" in settle(GPU, trust_remote_code=True).notes[0]


def test_resolving_changes_nothing_and_repeats() -> None:
    args, cfg = LlmArgs(model="m"), model()
    before = args.model_dump()
    assert resolve(args, cfg, CPU) == resolve(args, cfg, CPU)
    assert args.model_dump() == before


def test_a_prefill_budget_over_a_whole_step_is_refused_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"max_prefill_tokens \(600\) must not be above max_num_tokens \(512\)"):
        settle(CPU, max_num_tokens=512, scheduler_config={"max_prefill_tokens": 600})
    assert settle(GPU, max_num_tokens=512).max_prefill_tokens == 512


def test_tiers_without_what_they_live_on_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_cache_size = 9 keeps blocks .*enable_block_reuse is off"):
        settle(CPU, kv_cache_config={"host_cache_size": 9, "enable_block_reuse": False})
    folder = {"connector": "folder", "path": "here", "max_bytes": 9}
    with pytest.raises(ConfigError, match=r"kv_connector_config needs kv_cache_config\.host_cache_size"):
        settle(CPU, kv_connector_config=folder)
    settle(CPU, kv_connector_config=folder, kv_cache_config={"host_cache_size": 9})
