# SPDX-License-Identifier: Apache-2.0
"""The program: exit codes, one sentence for each mistake, `config` as YAML that loads again."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import __version__
from headrace.cli import main as program
from headrace.cli.commands import COMMANDS, GROUPS
from headrace.cli.main import main
from headrace.config.sources import every_leaf, load_settings, yaml_layer
from headrace.envs import SWITCHES
from headrace.errors import ConfigError, EngineDeadError

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "warning")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HEADRACE_TRACEBACK", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: headrace COMMAND")
    for command in (*COMMANDS, *GROUPS):
        is_top = " " not in command.name
        assert (f"  {command.name} " in said and command.summary in said) == is_top


def test_no_command_is_a_mistake_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headrace {__version__}\n"


@pytest.mark.parametrize("command", [c.name for c in COMMANDS])
@pytest.mark.parametrize("flag", ["-h", "--help", "--help-all"])
def test_every_command_has_help(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "whatever", flag]) == 0
    assert capsys.readouterr().out.startswith(f"usage: headrace {command}")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["srve", "demo"], "Unknown command 'srve'; the nearest is serve."),
        (["zzz"], "Unknown command 'zzz'; the commands are serve, generate, chat, config, bench."),
        (["serve"], "No model is named: give `headrace serve MODEL`"),
        (["config", "/no/such/model"], "local path /no/such/model does not exist"),
        (["serve", "demo", "--max_batch_size", "0"], "max_batch_size = 0 (from --max_batch_size) is not valid"),
        (["serve", "demo", "--enable_lora"], "enable_lora = True (from --enable_lora) is not supported yet"),
        (["generate", "demo", "--prompt", "x", "--top_p", "2"], "top_p must be from 0 to 1, but is 2.0."),
        (["generate", "demo", "--prompt", " "], "The prompt is empty"),
        (["generate", "demo", "--prompt", "x", "--raw", "--system", "y"], "--system has no place in a raw prompt"),
        (["chat", "demo", "--url", "http://x"], "Give a MODEL to load or a --url to talk to"),
        (["chat", "demo", "--api_key", "x"], "--api_key goes with --url"),
        (["serve", "demo", "--api_key_file", "/no/such"], "api_key_file = /no/such cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headrace: {said}")
    assert len(err.splitlines()) == 1


def raising(error: BaseException) -> object:
    def entry(invocation: object) -> int:
        raise error

    return entry


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no"), 2), (EngineDeadError("gone"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = program._load
    monkeypatch.setattr(program, "_load", lambda name: raising(error) if "serve" in name else load(name))
    assert main(["serve", "demo"]) == code


def test_a_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        main(["serve", "demo", "--nonsense"])


def test_every_variable_that_the_library_reads_is_known() -> None:
    root = Path(program.__file__).parent.parent
    read = {
        name for file in root.rglob("*.py") for name in re.findall(r"environ.*\"(HEADRACE_\w+)\"", file.read_text())
    }
    settings = {"HEADRACE_" + name.replace(".", "__").upper() for name in every_leaf()}
    assert read and read <= settings | SWITCHES.keys()


def test_python_m_headrace_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "serve"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: No model is named")


def test_config_prints_yaml_that_loads_to_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-num-seqs", "4", "--port", "9000", "--kv_cache_config.dtype", "bf16", "--cuda_graph_config", "null"]
    assert main(["config", str(folder), *flags]) == 0
    out, err = capsys.readouterr()
    assert "max_batch_size: 4" in out and "# command line" in out
    assert "max_seq_len: 256" in out and "# auto: the model's" in out
    assert "# LlamaForCausalLM" not in out and "LlamaForCausalLM" in out.splitlines()[0]
    assert "--max-num-seqs is taken as --max_batch_size 4." in err
    file = folder / "out.yaml"
    file.write_text(out)
    read = load_settings([yaml_layer(str(file))])
    assert (read.args.max_batch_size, read.args.max_seq_len, read.args.device, read.args.dtype) == (
        4,
        256,
        "cpu",
        "float32",
    )
    assert read.args.kv_cache_config.dtype == "bfloat16"
    assert read.args.cuda_graph_config is None
    assert read.server.port == 9000
    assert main(["config", "--config", str(file)]) == 0
    again = capsys.readouterr().out
    assert [line.split("#")[0] for line in again.splitlines()] == [line.split("#")[0] for line in out.splitlines()]


def test_config_says_where_each_value_came_from(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MAX_NUM_TOKENS", "512")
    file = folder / "c.yaml"
    file.write_text("max_batch_size: 16\nmax_num_tokens: 1024\n")
    assert main(["config", str(folder), "-c", str(file)]) == 0
    out, err = capsys.readouterr()
    top = [line for line in out.splitlines() if line[0] not in "# " and "# " in line]
    origin = {line.split(":")[0]: line.split("# ")[-1] for line in top}
    assert origin["max_batch_size"] == "yaml"
    assert origin["max_num_tokens"] == "environment"
    assert origin["seed"] == "default"
    assert f"max_num_tokens: 512 from HEADRACE_MAX_NUM_TOKENS overrides 1024 from {file}." in err


def test_config_hides_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(folder), "--api_key", "s3cret"]) == 0
    out, err = capsys.readouterr()
    assert "s3cret" not in out + err
    assert "hidden" in out


def test_a_value_that_cannot_be_here_is_refused_before_anything_loads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", str(folder), "--max_seq_len", "9999"]) == 2
    assert "max_seq_len (9999) is more than the model's positions allow (256)" in capsys.readouterr().err
    assert main(["config", str(folder), "--device", "cuda"]) == 2
    assert "nvidia-smi finds no GPU" in capsys.readouterr().err
