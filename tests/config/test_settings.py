# SPDX-License-Identifier: Apache-2.0
"""One tree of settings: its checks, its sources, and what a user is told about a bad value."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from headrace.config.base import leaves
from headrace.config.cache import KvCacheConfig
from headrace.config.llm_args import LlmArgs
from headrace.config.server import ServerConfig
from headrace.config.sources import Layer, environment_layer, every_leaf, load_settings, yaml_layer
from headrace.errors import ConfigError


def refusal(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        LlmArgs(**{"model": "demo", **settings})
    return caught.value.message


def layer(source: str, **values: object) -> Layer:
    return Layer(source, values, dict.fromkeys(values, source))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_bach_size": 3}, "Unknown setting max_bach_size; the nearest is max_batch_size."),
        ({"max_batch_size": 0}, "max_batch_size = 0 is not valid; it takes a whole number of at least 1."),
        ({"max_seq_len": "x"}, "max_seq_len = x is not valid; it takes auto, or a whole number of at least 1."),
        (
            {"seed": -1},
            "seed = -1 is not valid; it takes a whole number of at least 0 and below 9223372036854775808, or nothing "
            "(null).",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size (2) is not built yet"),
        ({"max_num_tokens": 4}, "max_num_tokens (4) must be at least max_batch_size (256)"),
        ({"enable_lora": True}, "enable_lora = True is not supported yet; leave it out."),
        ({"kv_cache_config": 3}, "kv_cache_config = 3 is not valid; it takes a mapping of settings."),
        ({"kv_cache_config": {"dtype": "fp9"}}, "kv_cache_config.dtype = fp9 is not valid; it takes auto, float32"),
        ({"kv_cache_config": {"tokens_per_block": 3}}, "kv_cache_config.tokens_per_block: 3 is not a power of two"),
        (
            {"kv_cache_config": {"host_cache_size": -5}},
            "kv_cache_config.host_cache_size = -5 is not valid; it takes a whole number of at least 0.",
        ),
        (
            {"kv_cache_config": {"secondary_offload_min_priority": 101}},
            "kv_cache_config.secondary_offload_min_priority = 101 is not valid; it takes a whole number from 0 to 100.",
        ),
        (
            {"kv_cache_config": {"host_cache_size": 5, "disk_cache_size": 9}},
            "kv_cache_config: disk_cache_size (9) needs disk_cache_path, the folder for the blocks; name one, or",
        ),
        (
            {"kv_cache_config": {"host_cache_size": 5, "disk_cache_path": "/tmp"}},
            "kv_cache_config: disk_cache_path (/tmp) needs disk_cache_size, the bytes",
        ),
        (
            {"kv_cache_config": {"disk_cache_size": 9, "disk_cache_path": "/tmp"}},
            "kv_cache_config: disk_cache_size (9) needs host_cache_size: blocks go to the disk and come back through",
        ),
        (
            {"kv_connector_config": {"connector": "lmcache"}},
            "kv_connector_config.connector = lmcache is not valid; it takes folder, or nothing (null).",
        ),
        (
            {"kv_connector_config": {"connector": "folder", "path": "/kv"}},
            "kv_connector_config: it takes connector (folder), path and max_bytes, or, for one of your own, "
            "connector_module and connector_worker_class; given are connector, path.",
        ),
        (
            {"kv_connector_config": {"connector_module": "m", "connector_worker_class": "C", "path": "/kv"}},
            "kv_connector_config: it takes connector (folder), path and max_bytes, or",
        ),
        (
            {"kv_connector_config": {"connector": "folder", "path": "/kv", "max_bytes": 9}},
            "kv_connector_config needs kv_cache_config.host_cache_size: blocks go out and come in through host memory",
        ),
        ({"kv_cache_config": {"use_uvm": True}}, "kv_cache_config.use_uvm = True is not supported yet; leave it out."),
        (
            {"kv_cache_config": {"dtyp": 1}},
            "Unknown setting kv_cache_config.dtyp; the nearest is kv_cache_config.dtype.",
        ),
        (
            {"cuda_graph_config": {"batch_sizes": [0]}},
            "cuda_graph_config.batch_sizes = 0 is not valid; it takes a list",
        ),
        (
            {"kv_cache_config": {"free_gpu_memory_fraction": float("nan")}},
            "kv_cache_config.free_gpu_memory_fraction = nan",
        ),
        ({"model": "  "}, "model: no model is named"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_it_and_what_works(settings: dict[str, object], sentence: str) -> None:
    said = refusal(**settings)
    assert said.startswith(sentence)
    assert "\n" not in said


def test_every_bad_field_is_named_at_once() -> None:
    said = refusal(max_batch_size="many", kv_cache_config={"dtype": "fp9", "nonsense": 1}).splitlines()
    assert [line.split(" is ")[0] for line in said if " is not valid" in line] == [
        "max_batch_size = many",
        "kv_cache_config.dtype = fp9",
    ]
    assert len(said) == 3


def test_a_nested_setting_is_taken_as_a_dict_or_as_its_class() -> None:
    by_dict = LlmArgs(model="demo", kv_cache_config={"dtype": "torch.bfloat16"})
    by_class = LlmArgs(model="demo", kv_cache_config=KvCacheConfig(dtype="bf16"))
    assert by_dict == by_class
    assert by_dict.kv_cache_config.dtype == "bfloat16"


def test_settings_survive_the_way_to_the_core_process() -> None:
    args = LlmArgs(model=Path("demo"), max_seq_len=128, cuda_graph_config=None, kv_cache_config={"max_tokens": 512})
    assert LlmArgs.model_validate_json(args.model_dump_json()) == args
    server = ServerConfig(api_key=["a"], port=0)
    assert ServerConfig.model_validate_json(server.model_dump_json()) == server


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        LlmArgs(model="demo").max_batch_size = 4  # type: ignore[misc]


def test_null_means_the_default_where_it_is_no_value_of_its_own() -> None:
    args = LlmArgs(model="demo", max_seq_len=None, kv_cache_config=None, cuda_graph_config=None)
    assert args.max_seq_len == "auto"
    assert args.kv_cache_config == KvCacheConfig()
    assert args.cuda_graph_config is None


def test_every_setting_has_help_a_group_and_a_default() -> None:
    for name, leaf in every_leaf(groups=True).items():
        assert leaf.field.description, name
        assert leaf.owner.__doc__ and leaf.owner.__doc__ != BaseModel.__doc__, name
        assert name == "model" or not leaf.field.is_required(), name


def test_no_setting_exists_twice() -> None:
    engine, server = ({leaf.name for leaf in leaves(tree)} for tree in (LlmArgs, ServerConfig))
    assert not engine & server
    assert not LlmArgs.NOT_YET.keys() & LlmArgs.model_fields.keys()
    assert not KvCacheConfig.NOT_YET.keys() & KvCacheConfig.model_fields.keys()


def test_a_command_line_wins_over_the_environment_over_a_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: demo\nmax_batch_size: 16\nmax_num_tokens: 999\nkv_cache_config: {dtype: fp16, max_tokens: 64}\n"
    )
    line = Layer("command line")
    line.put(("max_batch_size",), "4", "--max_batch_size")
    variables = {"HEADRACE_MAX_BATCH_SIZE": "8", "HEADRACE_KV_CACHE_CONFIG__DTYPE": "bf16"}
    settings = load_settings([yaml_layer(str(file)), environment_layer(variables), line])
    assert settings.args.max_batch_size == 4
    assert settings.args.max_num_tokens == 999
    assert settings.args.kv_cache_config == KvCacheConfig(dtype="bfloat16", max_tokens=64)
    assert settings.args.max_seq_len == "auto"
    assert settings.origin == {
        "model": "yaml",
        "max_batch_size": "command line",
        "max_num_tokens": "yaml",
        "kv_cache_config.dtype": "environment",
        "kv_cache_config.max_tokens": "yaml",
    }
    assert set(settings.overridden) == {
        f"max_batch_size: 8 from HEADRACE_MAX_BATCH_SIZE overrides 16 from {file}.",
        f"kv_cache_config.dtype: bf16 from HEADRACE_KV_CACHE_CONFIG__DTYPE overrides fp16 from {file}.",
        "max_batch_size: 4 from --max_batch_size overrides 8 from HEADRACE_MAX_BATCH_SIZE.",
    }


def test_a_stronger_source_turns_a_group_off_or_on_again() -> None:
    file = layer("yaml", model="demo", cuda_graph_config={"enable_padding": False})
    off = load_settings([file, layer("command line", cuda_graph_config=None)])
    assert off.args.cuda_graph_config is None
    assert off.origin == {"model": "yaml", "cuda_graph_config": "command line"}
    on = load_settings([layer("yaml", model="demo", cuda_graph_config=None), file])
    assert on.args.cuda_graph_config is not None
    assert on.args.cuda_graph_config.enable_padding is False


def test_secrets_are_not_shown_when_overridden() -> None:
    settings = load_settings([layer("yaml", model="demo", api_key=["old"]), layer("command line", api_key=["new"])])
    assert settings.server.api_key == ("new",)
    assert "old" not in str(settings.overridden) and "new" not in str(settings.overridden)


def test_an_error_names_the_source_of_the_value() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_size = x \(from HEADRACE_MAX_BATCH_SIZE\) is not valid"):
        load_settings([environment_layer({"HEADRACE_MODEL": "demo", "HEADRACE_MAX_BATCH_SIZE": "x"})])


def test_mistakes_in_both_trees_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings([layer("yaml", model="demo", max_batch_size=0, port=70000)])
    assert len(caught.value.message.splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("free_gpu_memory_fraction", "kv_cache_config.free_gpu_memory_fraction"),
        ("prot", "port"),
        ("max_seqlen", "max_seq_len"),
    ],
)
def test_an_unknown_key_names_the_nearest_wherever_it_lives(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"Unknown setting {name} .*; the nearest is {near}."):
        load_settings([layer("yaml", model="demo", **{name: 1})])


def test_an_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="HEADRACE_MAX_BACH_SIZE; the nearest is HEADRACE_MAX_BATCH_SIZE"):
        environment_layer({"HEADRACE_MAX_BACH_SIZE": "1"})


def test_variables_that_a_platform_makes_for_a_service_called_headrace_are_left_alone() -> None:
    made = {
        "HEADRACE_PORT": "tcp://10.0.0.1:8000",
        "HEADRACE_SERVICE_HOST": "10.0.0.1",
        "HEADRACE_SERVICE_PORT": "8000",
        "HEADRACE_SERVICE_PORT_HTTP": "8000",
        "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "HEADRACE_INPROC": "1",
        "HEADRACE_CACHE": "/tmp",
        "OTHER": "x",
    }
    assert environment_layer(made).values == {}
    assert environment_layer({"HEADRACE_PORT": "80"}).values == {"port": "80"}


def test_lists_and_groups_come_from_variables() -> None:
    read = environment_layer(
        {
            "HEADRACE_API_KEY": "a, b",
            "HEADRACE_ADMIN_KEY": '["c"]',
            "HEADRACE_SCHEDULER_CONFIG": "{watermark: 0.1}",
            "HEADRACE_TOKENIZER": "none",
        }
    ).values
    assert read == {
        "api_key": ["a", "b"],
        "admin_key": ["c"],
        "scheduler_config": {"watermark": 0.1},
        "tokenizer": None,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n", "must hold settings"),
        ("a: [1\n", "is not valid YAML"),
        (None, "cannot be read: No such file"),
        ("1: 2", "hold"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        yaml_layer(str(file))
    assert str(file) in caught.value.message and "\n" not in caught.value.message


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("# only a comment\n")
    assert yaml_layer(str(file)).values == {}


TENSORRT_LLM_YAML = """
backend: pytorch
max_batch_size: 16
max_num_tokens: 4096
max_seq_len: null
tensor_parallel_size: 1
moe_expert_parallel_size: null
disable_overlap_scheduler: true
enable_chunked_prefill: true
attn_backend: TRTLLM
print_iter_log: false
enable_iter_perf_stats: false
num_postprocess_workers: 0
stream_interval: 1
speculative_config: null
moe_config: {backend: AUTO}
cuda_graph_config: {enable_padding: true, max_batch_size: 16, batch_sizes: [1, 2, 4]}
kv_cache_config:
  enable_block_reuse: false
  enable_partial_reuse: true
  free_gpu_memory_fraction: 0.85
  dtype: auto
  tokens_per_block: 32
  host_cache_size: 0
scheduler_config:
  capacity_scheduler_policy: GUARANTEED_NO_EVICT
  context_chunking_policy: FIRST_COME_FIRST_SERVED
"""


def test_a_tensorrt_llm_file_loads(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(TENSORRT_LLM_YAML)
    args = load_settings([layer("x", model="demo"), yaml_layer(str(file))]).args
    assert (args.max_batch_size, args.max_num_tokens, args.max_seq_len) == (16, 4096, "auto")
    assert args.disable_overlap_scheduler
    assert args.attn_backend == "AUTO"
    assert args.kv_cache_config.free_gpu_memory_fraction == 0.85
    assert args.scheduler_config.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
    assert args.cuda_graph_config is not None and args.cuda_graph_config.batch_sizes == [1, 2, 4]


@pytest.mark.parametrize(
    "line", ["print_iter_log: true", "speculative_config: {decoding_type: NGram}", "num_postprocess_workers: 4"]
)
def test_what_is_not_built_is_refused_by_name_and_not_ignored(tmp_path: Path, line: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"model: demo\n{line}\n")
    with pytest.raises(ConfigError, match=rf"{line.split(':')[0]} = .* is not supported yet"):
        load_settings([yaml_layer(str(file))])


def test_key_files_join_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsecond\n third \n")
    assert ServerConfig(api_key=["first"], api_key_file=str(file)).with_key_files().api_key == (
        "first",
        "second",
        "third",
    )
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match=r"api_key_file = .* holds no key"):
        ServerConfig(api_key_file=str(file)).with_key_files()
    with pytest.raises(ConfigError, match=r"admin_key_file = /no/such cannot be read"):
        ServerConfig(admin_key_file="/no/such").with_key_files()
