# SPDX-License-Identifier: Apache-2.0
"""Flags are generated from the config tree: every spelling of a value, every mistake, the help."""

import pytest

from headrace.cli.alias import ALIASES
from headrace.cli.commands import COMMANDS, Command
from headrace.cli.flags import Flags, Invocation
from headrace.config.base import leaves
from headrace.config.llm_args import LlmArgs
from headrace.config.server import ServerConfig
from headrace.config.sources import every_leaf
from headrace.errors import ConfigError

BY_NAME: dict[str, Command] = {command.name: command for command in COMMANDS}


def parse(*argv: str, command: str = "serve") -> Invocation:
    return Flags(BY_NAME[command]).parse(list(argv))


def values(*argv: str) -> dict[str, object]:
    read = parse("demo", *argv).layer.values
    assert read.pop("model") == "demo"
    return read


def refusal(*argv: str, command: str = "serve") -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, command=command)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "argv",
    [
        ("--kv_cache_config.dtype", "fp8"),
        ("--kv_cache_config.dtype=fp8",),
        ("--kv-cache-config.dtype=fp8",),
        ("--kv_cache-config.dtype", "fp8"),
    ],
)
def test_underscores_and_dashes_are_the_same(argv: tuple[str, ...]) -> None:
    assert values(*argv) == {"kv_cache_config": {"dtype": "fp8"}}


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (("--enable_chunked_prefill",), "true"),
        (("--no_enable_chunked_prefill",), "false"),
        (("--no-enable-chunked-prefill",), "false"),
        (("--enable_chunked_prefill", "false"), "false"),
        (("--enable_chunked_prefill=Off",), "false"),
        (("--enable-chunked-prefill=1",), "true"),
    ],
)
def test_a_boolean_is_on_by_its_name(argv: tuple[str, ...], value: str) -> None:
    assert values(*argv) == {"enable_chunked_prefill": value}


def test_a_boolean_does_not_swallow_the_model() -> None:
    read = parse("--enable_chunked_prefill", "demo")
    assert read.layer.values == {"enable_chunked_prefill": "true", "model": "demo"}


def test_a_value_may_begin_with_a_dash() -> None:
    read = parse("demo", "--prompt", "--no idea", "--temperature", "-1", command="generate")
    assert read.options["prompt"] == "--no idea"
    assert read.options["temperature"] == -1.0


def test_a_repeated_flag_is_a_list_for_lists_and_the_last_for_others() -> None:
    assert values("--api_key", "a", "--api-key", "b", "--port", "1", "--port", "2") == {
        "api_key": ["a", "b"],
        "port": "2",
    }
    assert parse("demo", "--stop", "a", "--stop", "b", command="chat").options["stop"] == ["a", "b"]


def test_a_group_is_given_whole_or_in_part() -> None:
    assert values("--cuda_graph_config", "null") == {"cuda_graph_config": None}
    assert values("--cuda_graph_config.batch_sizes", "[1, 2]") == {"cuda_graph_config": {"batch_sizes": [1, 2]}}
    assert values("--kv_cache_config", "{dtype: fp8}", "--kv_cache_config.max_tokens", "64") == {
        "kv_cache_config": {"dtype": "fp8", "max_tokens": "64"}
    }


@pytest.mark.parametrize(
    ("argv", "read", "became"),
    [
        (("--max-model-len", "512"), {"max_seq_len": "512"}, "--max-model-len is taken as --max_seq_len 512."),
        (("--max-num-seqs=4",), {"max_batch_size": "4"}, "--max-num-seqs is taken as --max_batch_size 4."),
        (("--max-num-batched-tokens", "9"), {"max_num_tokens": "9"}, "--max-num-batched-tokens is taken as"),
        (
            ("--gpu-memory-utilization", "0.5"),
            {"kv_cache_config": {"free_gpu_memory_fraction": "0.5"}},
            "--gpu-memory-utilization is taken as --kv_cache_config.free_gpu_memory_fraction 0.5 (a share of",
        ),
        (("--block-size", "16"), {"kv_cache_config": {"tokens_per_block": "16"}}, "--block-size is taken as"),
        (
            ("--no-enable-prefix-caching",),
            {"kv_cache_config": {"enable_block_reuse": "false"}},
            "--no-enable-prefix-caching is taken as --kv_cache_config.enable_block_reuse false.",
        ),
        (
            ("--kv-events-config", '{"topic": "kv"}'),
            {"kv_cache_config": {"kv_events_config": {"topic": "kv"}}},
            '--kv-events-config is taken as --kv_cache_config.kv_events_config {"topic": "kv"}.',
        ),
        (("--no-async-scheduling",), {"disable_overlap_scheduler": "true"}, "--no-async-scheduling is taken as"),
        (("--enforce-eager",), {"cuda_graph_config": None}, "--enforce-eager is taken as --cuda_graph_config null."),
        (("--tp_size", "1"), {"tensor_parallel_size": "1"}, "--tp_size is taken as --tensor_parallel_size 1."),
    ],
)
def test_another_spelling_is_taken_and_says_what_it_became(
    argv: tuple[str, ...], read: dict[str, object], became: str
) -> None:
    invocation = parse("demo", *argv)
    assert invocation.layer.values == {**read, "model": "demo"}
    assert len(invocation.became) == 1 and invocation.became[0].startswith(became)
    (name,) = set(invocation.layer.spelled) - {"model"}
    assert invocation.layer.spelled[name] == argv[0].partition("=")[0]


def test_every_alias_leads_to_a_flag() -> None:
    flags = Flags(BY_NAME["serve"]).flags
    for name, alias in ALIASES.items():
        assert alias.target in flags, name
        assert name not in flags, name


@pytest.mark.parametrize("name", [name for name, command in BY_NAME.items() if command.aliases or command.refused])
def test_every_alias_of_a_command_leads_to_its_flag_and_hides_none(name: str) -> None:
    command = BY_NAME[name]
    flags = Flags(command).flags
    for spelled, alias in command.aliases.items():
        is_inert = alias.value == "" or None in (alias.values or {}).values()
        assert alias.target in flags or is_inert, spelled
        assert spelled not in flags, spelled
    for spelled, why in command.refused.items():
        assert spelled not in flags and spelled not in command.aliases, spelled
        assert why.endswith(".") and why[0].islower(), spelled


@pytest.mark.parametrize(
    ("argv", "read", "became"),
    [
        ("--kv_cache_free_gpu_mem_fraction 0.8", {"kv_cache_config": {"free_gpu_memory_fraction": "0.8"}}, 1),
        ("--scheduler_policy max_utilization", {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}},
         1),
        ("--tp 2 --pp 1 --ep 1", {"tensor_parallel_size": "2", "pipeline_parallel_size": "1",
                                  "moe_expert_parallel_size": "1"}, 3),
        ("--enable_chunked_context", {"enable_chunked_prefill": "true"}, 1),
        ("--beam_width 1 --backend pytorch", {"backend": "pytorch"}, 0),
        ("--eos_id -1", {}, 1),
    ],
)  # fmt: skip
def test_flags_of_trtllm_bench_are_taken(argv: str, read: dict[str, object], became: int) -> None:
    invocation = parse("-m", "demo", *argv.split(), command="bench throughput")
    assert invocation.layer.values == {**read, "model": "demo"}
    assert len(invocation.became) == became
    assert invocation.options["ignore_eos"] is True


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--engine_dir e", "Flag --engine_dir names a built engine, which is not needed here:"),
        ("--target-input-len 5", "Flag --target-input-len feeds a heuristic"),
        ("--beam_width 4", "Flag --beam_width takes 1 here, but got '4'."),
        ("--eos_id 2", "Flag --eos_id takes -1 here, but got '2'."),
        (
            "--scheduler_policy static_batch",
            "Flag --scheduler_policy takes guaranteed_no_evict or max_utilization here",
        ),
    ],
)
def test_flags_of_trtllm_bench_without_a_meaning_are_refused_with_the_reason(argv: str, said: str) -> None:
    assert refusal("demo", *argv.split(), command="bench latency").startswith(said)


def test_a_config_file_has_two_names_and_a_short_one() -> None:
    for spelled in ("--config", "--extra_llm_api_options", "--extra-llm-api-options", "-c"):
        invocation = parse("demo", spelled, "f.yaml")
        assert invocation.options["config"] == "f.yaml"
        assert not invocation.became


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("demo", "--max_batchsize", "3"), "Unknown flag --max_batchsize; the nearest is --max_batch_size."),
        (("demo", "--watermark", "1"), "Unknown flag --watermark; the nearest is --scheduler_config.watermark."),
        (("demo", "--zzz"), "Unknown flag --zzz; `headrace serve --help-all` lists every flag."),
        (("demo", "-z"), "Unknown flag -z; see `headrace serve --help`."),
        (("demo", "--port"), "Flag --port needs a value."),
        (("demo", "--access_log=maybe"), "Flag --access_log takes true or false, but got 'maybe'."),
        (("demo", "--no_port"), "Flag --no_port makes no sense: port is not true or false."),
        (("demo", "other"), "Unrecognized arguments: other; see `headrace serve --help`."),
        (("demo", "--cuda_graph_config", "{"), "the value of cuda_graph_config is not valid YAML"),
    ],
)
def test_a_mistake_is_one_sentence(argv: tuple[str, ...], said: str) -> None:
    assert refusal(*argv).startswith(said)


def test_an_option_of_the_wrong_type_is_named() -> None:
    assert (
        refusal("demo", "--temperature", "hot", command="generate")
        == "Flag --temperature takes a number, but got 'hot'."
    )
    assert refusal("demo", "--top_k", "1.5", command="chat") == "Flag --top_k takes a whole number, but got '1.5'."
    assert refusal("demo", "--port", "1", command="generate").startswith("Unknown flag --port")


def test_a_flag_that_is_known_but_not_built_goes_to_the_settings_to_judge() -> None:
    assert values("--backend", "pytorch", "--print_iter_log") == {"backend": "pytorch", "print_iter_log": True}


def test_model_is_also_a_flag() -> None:
    assert parse("--model", "demo").layer.values == {"model": "demo"}
    assert parse("--url", "x", "--model", "name", command="chat").options["model"] == "name"


def test_the_full_help_names_every_setting_and_the_short_one_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    flags = Flags(BY_NAME["serve"])
    full, short = flags.help(show_all=True), flags.help(show_all=False)
    for name in every_leaf():
        assert name == "model" or f"--{name} " in full, name
    assert len(short.splitlines()) < 60
    assert "--max_batch_size" in short and "--scheduler_config.watermark" not in short
    assert f"{sum(not leaf.hint.common for leaf in every_leaf(groups=True).values())} more flags" in short
    for title in ("Model:", "Limits:", "KV cache:", "Device:", "HTTP server:"):
        assert title in short
    assert "(default: 8000)" in short and "[beta]" in full


def test_a_command_without_a_server_has_no_server_flags() -> None:
    names = set(Flags(BY_NAME["generate"]).flags)
    assert not names & {leaf.name for leaf in leaves(ServerConfig)} - {"log_level"}
    assert {leaf.name for leaf in leaves(LlmArgs)} - names == {"model"}
