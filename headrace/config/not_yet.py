# SPDX-License-Identifier: Apache-2.0
"""Top-level settings that YAML files of the same shape carry and that have no implementation here yet.

Each maps to the values that ask for nothing (None always does); any other value is an error that says so. A setting
leaves this table in the change that builds it.
"""

from typing import Any

OFF = (False,)

# Values that name another library's own default, and what asks for the same here.
FOREIGN_BACKENDS = {"TRTLLM": "AUTO"}
FOREIGN_GENERATION_CONFIGS = {"trtllm": "none", "vllm": "none"}

TOP_LEVEL: dict[str, tuple[Any, ...]] = {
    "backend": ("pytorch",),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (),
    "custom_tokenizer": (),
    "post_processor_hook": (),
    "enable_lm_head_tp_in_adp": OFF,
    "pp_partition": (),
    "cp_config": ({},),
    "gpus_per_node": (1,),
    "model_kwargs": ({},),
    "enable_lora": OFF,
    "lora_config": (),
    "guided_decoding_backend": (),
    "batched_logits_processor": (),
    "iter_stats_max_iterations": (),
    "request_stats_max_iterations": (),
    "peft_cache_config": (),
    "cache_transceiver_config": (),
    "sparse_attention_config": (),
    "kv_cache_compression_config": (),
    "speculative_config": (),
    "max_input_len": (),
    "max_beam_width": (1,),
    "gather_generation_logits": OFF,
    "num_postprocess_workers": (0,),
    "postprocess_tokenizer_dir": (),
    "num_serve_frontends": (1,),
    "reasoning_parser": (),
    "tool_parser": (),
    "otlp_traces_endpoint": (),
    "return_perf_metrics": OFF,
    "perf_metrics_output_dir": (),
    "prometheus_metrics_config": (),
    "enable_energy_metrics": OFF,
    "orchestrator_type": (),
    "env_overrides": ({},),
    "telemetry_config": ({},),
    "garbage_collection_gen0_threshold": (20000,),
    "encoder_cuda_graph_config": (),
    "encoder_max_batch_size": (),
    "encoder_max_num_tokens": (),
    "multimodal_config": ({},),
    "attention_dp_config": (),
    "moe_config": ({}, {"backend": "AUTO"}),
    "nvfp4_gemm_config": ({},),
    "dwdp_config": (),
    "sampler_type": ("auto", "TorchSampler"),
    "sampler_force_async_worker": OFF,
    "enable_iter_perf_stats": OFF,
    "enable_iter_req_stats": OFF,
    "print_iter_log": OFF,
    "batch_wait_timeout_ms": (0,),
    "batch_wait_timeout_iters": (0,),
    "batch_wait_max_tokens_ratio": (0,),
    "torch_compile_config": (),
    "prefill_cuda_graph_backend": ("disabled",),
    "enable_autotuner": (True, False),
    "enable_layerwise_nvtx_marker": OFF,
    "enable_min_latency": OFF,
    "force_dynamic_quantization": OFF,
    "stream_interval": (1,),
    "allreduce_strategy": ("AUTO",),
    "checkpoint_loader": (),
    "checkpoint_format": ("HF",),
    "checkpoint_io_policy": ("auto", "native"),
    "mm_encoder_only": OFF,
    "disable_mm_encoder": OFF,
    "encode_only": OFF,
    "sleep_config": (),
    "quant_config": (),
    "max_stats_len": (1000,),
}
