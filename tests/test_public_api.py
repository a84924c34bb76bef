# SPDX-License-Identifier: Apache-2.0
"""What users rely on, name by name: a diff here is a line of the release notes."""

from operator import attrgetter
from pathlib import Path

import pytest

import headrace
from headrace.cli.commands import COMMANDS, Command
from headrace.cli.flags import Flags
from headrace.server.openai.protocol.chat import ChatCompletionRequest
from headrace.server.openai.protocol.completions import CompletionRequest
from headrace.server.openai.protocol.generation import GenerationRequest

NAMES = """
    LLM AsyncLLM CompletionOutput CudaGraphConfig HeadraceError KvCacheConfig KvCacheConnectorConfig
    KvCacheRetentionConfig LlmArgs Logprob
    RequestOutput SamplingParams SchedulerConfig __version__
"""

ENGINE = """
    tokenizer skip_tokenizer_init chat_template served_model_name revision trust_remote_code load_format
    generation_config seed max_batch_size max_num_tokens max_seq_len enable_chunked_prefill kv_cache_config
    kv_cache_config.enable_block_reuse kv_cache_config.enable_partial_reuse kv_cache_config.copy_on_partial_reuse
    kv_cache_config.free_gpu_memory_fraction kv_cache_config.max_tokens
    kv_cache_config.dtype kv_cache_config.tokens_per_block kv_cache_config.event_buffer_max_size
    kv_cache_config.kv_events_config kv_cache_config.kv_events_config.enable_kv_cache_events
    kv_cache_config.kv_events_config.publisher kv_cache_config.kv_events_config.endpoint
    kv_cache_config.kv_events_config.replay_endpoint kv_cache_config.kv_events_config.buffer_steps
    kv_cache_config.kv_events_config.hwm kv_cache_config.kv_events_config.max_queue_size
    kv_cache_config.kv_events_config.topic kv_cache_config.host_cache_size
    kv_cache_config.disk_cache_path kv_cache_config.disk_cache_size kv_cache_config.secondary_offload_min_priority
    kv_connector_config kv_connector_config.connector kv_connector_config.path kv_connector_config.max_bytes
    kv_connector_config.connector_module kv_connector_config.connector_worker_class
    scheduler_config scheduler_config.capacity_scheduler_policy scheduler_config.max_prefill_tokens
    scheduler_config.watermark
    scheduler_config.waiting_queue_policy device dtype num_threads attn_backend deterministic
    disable_overlap_scheduler cuda_graph_config cuda_graph_config.batch_sizes cuda_graph_config.max_batch_size
    cuda_graph_config.enable_padding cuda_graph_config.mixed_num_tokens tensor_parallel_size pipeline_parallel_size
    context_parallel_size moe_expert_parallel_size moe_tensor_parallel_size enable_attention_dp
"""
SERVER = """
    host port api_key api_key_file admin_key admin_key_file max_body_bytes drain_timeout_s keep_alive_timeout_s
    max_waiting_requests allow_origins access_log log_level
"""
SAMPLING = """
    max_tokens temperature top_k top_p min_p seed repetition_penalty presence_penalty frequency_penalty stop
    ignore_eos
"""
BENCH_WORK = "dataset num_requests input_len output_len random_seed temperature ignore_eos warm_cache"
BENCH_OUTPUT = "report_json plot ceilings log_level"
BENCH_ENGINE = f"{BENCH_WORK} {BENCH_OUTPUT} model_path concurrency warmup streaming trace_steps config {ENGINE}"
NORMAL = "input_mean input_stdev output_mean output_stdev"
PREPARE = "output model tokenizer log_level"
RANDOM = f"{PREPARE} vocab_size random_seed text"
FLAGS = {
    "serve": f"config {ENGINE} {SERVER}",
    "generate": f"prompt system raw config log_level {SAMPLING} {ENGINE}",
    "chat": f"url model api_key system config log_level {SAMPLING} {ENGINE}",
    "config": f"config {ENGINE} {SERVER}",
    "bench throughput": BENCH_ENGINE,
    "bench latency": BENCH_ENGINE,
    "bench serve": f"url model endpoint api_key extra_body model_path num_gpus {BENCH_WORK} {BENCH_OUTPUT} "
    "max_concurrency request_rate burstiness warmup",
    "bench prepare-dataset token-norm-dist": f"{NORMAL} num_requests {RANDOM}",
    "bench prepare-dataset token-unif-dist": f"input_min input_max output_min output_max num_requests {RANDOM}",
    "bench prepare-dataset shared-prefix": f"prefix_len num_prefixes {NORMAL} num_requests {RANDOM}",
    "bench prepare-dataset multi-turn": f"num_conversations num_turns {NORMAL} {RANDOM}",
    "bench prepare-dataset from-jsonl": f"input output_mean num_requests {PREPARE}",
    "bench compare": "plot log_level",
}
SHORT = {"generate": ["-p", "-c", "-m"], "bench serve": [], "bench compare": []}


def test_the_names_of_the_package() -> None:
    assert headrace.__all__ == NAMES.split()
    assert all(attrgetter(name)(headrace) for name in NAMES.split())


def test_the_commands() -> None:
    assert [command.name for command in COMMANDS] == list(FLAGS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_flags_of_a_command(command: Command) -> None:
    flags = Flags(command)
    assert set(flags.flags) == set(FLAGS[command.name].split())
    usual = ["-o"] if "prepare-dataset" in command.name else ["-c", "-m"]
    assert list(flags.shorts) == SHORT.get(command.name, usual)


@pytest.mark.parametrize("request_model", [ChatCompletionRequest, CompletionRequest])
def test_the_manual_has_every_field_of_a_request(request_model: type[GenerationRequest]) -> None:
    text = (Path(headrace.__file__).parent.parent / "docs" / "server.md").read_text()
    assert [name for name in request_model.model_fields if f"`{name}`" not in text] == []
