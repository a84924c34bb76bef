# SPDX-License-Identifier: Apache-2.0
"""trtllm-bench's flags on `headrace bench`: those with a meaning here, and why the others have none."""

from headrace.cli.alias import Alias

IN_REPORT = "writes what --report_json holds, but for single requests, which no report here has: leave it out."
UNTUNED = (
    "feeds a heuristic that picks max_batch_size and max_num_tokens; here these are settings with defaults: give them "
    "themselves, or leave it out."
)

ENGINE_ALIASES: dict[str, Alias] = {
    "kv_cache_free_gpu_mem_fraction": Alias("kv_cache_config.free_gpu_memory_fraction"),
    "enable_chunked_context": Alias("enable_chunked_prefill"),
    "scheduler_policy": Alias(
        "scheduler_config.capacity_scheduler_policy",
        values={"guaranteed_no_evict": "GUARANTEED_NO_EVICT", "max_utilization": "MAX_UTILIZATION"},
    ),
    "tp": Alias("tensor_parallel_size"),
    "pp": Alias("pipeline_parallel_size"),
    "ep": Alias("moe_expert_parallel_size"),
    "eos_id": Alias("ignore_eos", values={"-1": "true"}, note="answers go to their full length"),
    "beam_width": Alias("beam_width", values={"1": None}),
}
ENGINE_REFUSED = {
    "engine_dir": "names a built engine, which is not needed here: give the model itself, or its folder.",
    "modality": "asks for images or video, which are not supported yet; leave it out.",
    "max_input_len": "limits prompts with images; the limit of prompt and answer together is --max_seq_len.",
    "target_input_len": UNTUNED,
    "target_output_len": UNTUNED,
    "cluster_size": "divides experts over clusters of GPUs, which is not supported yet; leave it out.",
    "iteration_log": "writes a line for each step; --trace_steps sums steps up in the report instead.",
    "output_json": IN_REPORT,
    "request_json": IN_REPORT,
    "workspace": "is a folder for built engines; nothing is built here: leave it out.",
}

DATASET_ALIASES: dict[str, Alias] = {
    "stdout": Alias("output", value="-"),
    "task_id": Alias("task_id", values={"-1": None}),
    "trust_remote_code": Alias("trust_remote_code", value="", note="no code that comes with a checkpoint is ever run"),
}
DATASET_REFUSED = {
    "rand_task_id": "draws adapters for the requests; requests with adapters are not supported yet: leave it out.",
    "lora_dir": "names adapters; requests with adapters are not supported yet: leave it out.",
    "num_images": "asks for images, which are not supported yet; leave it out.",
}
