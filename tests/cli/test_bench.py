# SPDX-License-Identifier: Apache-2.0
"""`headrace bench` from the command line: bad input, whole runs on a tiny random model, runs that are cut short."""

import functools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Answer, FakeLLM
from running_server import RunningServer
from tiny_model import CONFIG, byte_tokenizer

from headrace.bench import run_engine
from headrace.bench.dataset import read_dataset
from headrace.cli.commands import COMMANDS, GROUPS
from headrace.cli.main import main
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.core_client import CoreOptions

ENGINE_TESTS = str(Path(__file__).parents[1] / "engine")
VOCAB_SIZE = CONFIG["vocab_size"]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "warning")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HEADRACE_TRACEBACK", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a model's small files."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def ceilings(tmp_path: Path) -> list[str]:
    """Flags that keep a run from measuring the machine."""
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps({"read_bytes_per_s": 1e10, "matrix_flops": {"float32": 1e11}}))
    return ["--ceilings", str(path)]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    running = RunningServer(FakeLLM(lambda prompt, choice: Answer("x" * 200, seconds_per_step=0.002)))
    yield running
    running.close()


def write_set(folder: Path, *lines: dict[str, Any], name: str = "set.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


GOOD = {"task_id": 0, "input_ids": [1, 2, 3], "output_tokens": 4}


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence that a bad command line gets, with exit code 2."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1, err
    return err


def test_every_group_is_the_beginning_of_a_command_and_every_beginning_a_group_or_command() -> None:
    names = {command.name for command in COMMANDS}
    groups = {group.name for group in GROUPS}
    beginnings = {" ".join(name.split()[:n]) for name in names for n in range(1, len(name.split()))}
    assert beginnings == groups and not groups & names


def test_the_help_of_a_group_is_short_and_names_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: headrace bench COMMAND [flags]") and len(said.splitlines()) < 25
    for word in ("throughput", "latency", "serve", "prepare-dataset", "compare"):
        assert f"\n  {word} " in said
    assert "token-unif-dist" not in said
    assert main(["bench"]) == 2
    assert capsys.readouterr().out == said
    assert main(["bench", "prepare_dataset", "-h"]) == 0
    assert "token-norm-dist" in capsys.readouterr().out


def test_flags_may_stand_before_the_rest_of_a_name(tmp_path: Path) -> None:
    out = str(tmp_path / "o.jsonl")
    numbers = ["--input_mean", "5", "--output_mean", "2", "--num_requests", "3", "--vocab_size", "50"]
    assert main(["bench", "prepare-dataset", "--output", out, "token-norm-dist", *numbers]) == 0
    assert len(read_dataset(out)) == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench", "latncy"], "Unknown command 'latncy'; the nearest is latency."),
        (["bench", "throughput"], "No model is named: give `headrace bench throughput MODEL`"),
        (["bench", "throughput", "MODEL", "--concurrency", "0"], "concurrency must be at least 1, but is 0."),
        (["bench", "throughput", "MODEL", "--concurrency", "8,0"], "concurrency must be at least 1, but is 0."),
        (
            ["bench", "throughput", "MODEL", "--concurrency", "a"],
            "Flag --concurrency takes whole numbers (1,8,64), but",
        ),
        (["bench", "throughput", "MODEL", "--num_requests", "-3"], "num_requests must be at least 1, but is -3."),
        (["bench", "throughput", "MODEL", "--input_len", "0"], "input_len must be at least 1, but is 0."),
        (["bench", "throughput", "MODEL", "--trace_steps", "-1"], "trace_steps must not be negative, but is -1."),
        (["bench", "throughput", "MODEL", "--dataset", "/no/such"], "dataset /no/such cannot be read: No such file"),
        (["bench", "throughput", "MODEL", "--plot", "x.pdf"], "plot x.pdf must end in .png, .svg or .html."),
        (["bench", "throughput", "MODEL", "--report_json", "/no/such/r"], "report_json /no/such/r cannot be written"),
        (["bench", "throughput", "MODEL", "--max_batch_size", "0"], "max_batch_size = 0 (from --max_batch_size)"),
        (
            ["bench", "throughput", "MODEL", "--input_len", "600", "--output_len", "8"],
            "Request of --input_len has 600 prompt and 8 output tokens: 608 are over max_seq_len, which is 512;",
        ),
        (
            ["bench", "throughput", "MODEL", "--max_seq_len", "64", "--input_len", "60", "--output_len", "8"],
            "Request of --input_len has 60 prompt and 8 output tokens: 68 are over max_seq_len, which is 64;",
        ),
        (["bench", "serve"], "bench serve needs a server: --url http://127.0.0.1:8000."),
        (["bench", "serve", "--url", "ftp://x"], "--url ftp://x is not the address of a server"),
        (["bench", "serve", "--url", "x", "--max_concurrency", "0"], "max_concurrency must be at least 1, but is 0."),
        (["bench", "serve", "--url", "x", "--request_rate", "0"], "request_rate must be over 0, but is 0;"),
        (
            ["bench", "serve", "--url", "x", "--endpoint", "embed"],
            "endpoint must be completions or chat, but is embed.",
        ),
        (["bench", "serve", "--url", "x", "--extra_body", "{"], "extra_body is not JSON"),
        (["bench", "serve", "--url", "x", "--max_batch_size", "3"], "Unknown flag --max_batch_size;"),
        (["bench", "compare", "one.json"], "compare needs two or more report files"),
        (["bench", "compare", "/no/a", "/no/b"], "/no/a cannot be read: No such file or directory."),
        (["bench", "prepare-dataset", "token-norm-dist", "--num_requests", "2"], "--input_mean is needed"),
        (["bench", "prepare-dataset", "from-jsonl"], "from-jsonl needs a file of real requests: --input FILE."),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    argv: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "MODEL" in argv:
        argv = [*(model if word == "MODEL" else word for word in argv), "--load_format", "dummy"]
    assert refused(argv, capsys).startswith(f"headrace: {said}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"task_id": 7, "output_tokens": 3}, "line 2 has no tokens: give input_ids, or prompt as text."),
        ({"input_ids": [1]}, "line 2 has no output_tokens"),
        ({"task_id": 7, "input_ids": [1] * 500, "output_tokens": 13}, "Request 7 has 500 prompt and 13 output tokens"),
        ({"task_id": 7, "input_ids": [1000], "output_tokens": 1}, "Request 7 holds the token id 1000"),
        ({"task_id": 7, "prompt": "x" * 505, "output_tokens": 8}, "Request 7 has 505 prompt and 8 output tokens"),
    ],
)
def test_a_bad_line_stops_the_run_before_the_model_loads(
    line: dict[str, Any], said: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_set(tmp_path, GOOD, line)
    assert said in refused(["bench", "throughput", model, "--load_format", "dummy", "--dataset", path], capsys)


def test_more_requests_than_the_file_has_is_a_mistake(
    model: str, tmp_path: Path, ceilings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "throughput", model, "--load_format", "dummy", "--dataset", write_set(tmp_path, GOOD)]
    assert "num_requests (2) is more than dataset" in refused([*argv, "--num_requests", "2", *ceilings], capsys)


@pytest.mark.parametrize(
    ("kind", "flags", "count"),
    [
        ("token-norm-dist", ["--num_requests", "6", "--input_mean", "9", "--output_mean", "3"], 6),
        (
            "token-unif-dist",
            ["--num_requests", "6", "--input_min", "2", "--input_max", "9", "--output_min", "1", "--output_max", "2"],
            6,
        ),
        ("shared-prefix", ["--num_requests", "6", "--prefix_len", "8", "--input_mean", "9", "--output_mean", "3"], 6),
        ("multi-turn", ["--num_conversations", "2", "--num_turns", "3", "--input_mean", "9", "--output_mean", "3"], 6),
    ],
)
def test_a_prepared_file_is_a_dataset(kind: str, flags: list[str], count: int, model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "o.jsonl")
    assert main(["bench", "prepare-dataset", kind, "--model", model, "--output", out, *flags]) == 0
    requests = read_dataset(out)
    assert len(requests) == count
    assert max(token for request in requests for token in request.input_ids or ()) < VOCAB_SIZE


def test_a_set_goes_to_the_terminal_by_either_name(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-requests", "2", "--input-mean", "5", "--output-mean", "2"]
    written = []
    for where in (["--stdout"], ["--output", "-"]):
        assert main(["bench", "prepare-dataset", "--tokenizer", model, *where, "token-norm-dist", *flags]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] and written[0].count("\n") == 2
    assert "requests with adapters are not supported yet" in refused(
        ["bench", "prepare-dataset", "--lora-dir", "x", "--stdout", "token-norm-dist", *flags], capsys
    )


def test_a_prepared_file_may_hold_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num_requests", "1", "--input_mean", "9", "--output_mean", "3", "--text", "--output", "-"]
    assert main(["bench", "prepare-dataset", "token-norm-dist", "--tokenizer", model, *flags]) == 0
    line = json.loads(capsys.readouterr().out)
    assert set(line) == {"task_id", "prompt", "output_tokens"}


def test_real_requests_become_a_dataset(model: str, tmp_path: Path) -> None:
    real = write_set(
        tmp_path, {"prompt": "abc", "max_tokens": 5}, {"prompt": "de", "completion": "fghi"}, name="r.jsonl"
    )
    out = str(tmp_path / "o.jsonl")
    assert main(["bench", "prepare-dataset", "from-jsonl", "--model", model, "--input", real, "--output", out]) == 0
    assert [(request.input_ids, request.output_tokens) for request in read_dataset(out)] == [
        (tuple(b"abc"), 5),
        (tuple(b"de"), 4),
    ]


def test_a_sweep_over_an_engine(
    model: str, tmp_path: Path, ceilings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two levels, cold, traced; the report, the table and the picture."""
    path, picture = tmp_path / "r.json", tmp_path / "p.svg"
    argv = ["bench", "throughput", "--model", model, "--load_format", "dummy", "--concurrency", "1,3", *ceilings]
    argv += ["--num_requests", "6", "--input_len", "40", "--output_len", "8", "--trace_steps", "4"]
    assert main([*argv, "--report_json", str(path), "--plot", str(picture)]) == 0
    out, err = capsys.readouterr()
    report = json.loads(path.read_text())
    assert not report["is_partial"] and report["kind"] == "throughput"
    assert report["model"]["is_random"] and report["engine"]["vocab_size"] == VOCAB_SIZE
    assert report["memory"]["peak_bytes"] > 0
    assert report["startup"]["weights"] > 0 and "startup" not in report["engine"]
    assert f"start {sum(report['startup'].values()):.1f} s" in out
    assert [level["concurrency"] for level in report["levels"]] == [1, 3]
    for level in report["levels"]:
        assert (level["num_requests"], level["num_failed"], level["num_unfinished"]) == (6, 0, 0)
        assert (level["input_tokens"], level["output_tokens"]) == (240, 48)
        assert level["cache"] == {
            "prompt_tokens": 240, "cached_tokens": 0, "share": 0.0, "is_meant_cold": True, "is_as_meant": True,
        }  # fmt: skip
        assert 0 < level["roofline"]["closed_loop"]["share"] < 1
        assert level["steps"]["num_steps"] >= 16 and level["steps"]["decode_tokens_per_step"] > 0
        assert level["trace"]["sequences"] == level["concurrency"]
        assert level["trace"]["num_steps"] == 4 and level["trace"]["busy_ms_per_step"] > 0
        assert level["ttft_ms"]["mean"] > 0 and level["itl_ms"]["p99"] >= level["itl_ms"]["p50"]
    assert report["levels"][1]["mean_in_flight"] > 2
    assert "Share of the roofline" in out and "Trace of 4 steps" in out and "NOT COLD" not in out
    assert picture.read_text().startswith("<svg")
    assert f"The report is in {path}." in err


def test_a_set_that_repeats_itself_is_marked_unless_it_says_so(
    model: str, tmp_path: Path, ceilings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [(i * 7) % 250 for i in range(80)]
    path = write_set(tmp_path, *({"task_id": i, "input_ids": [*ids, i], "output_tokens": 2} for i in range(4)))
    argv = ["bench", "latency", model, "--load_format", "dummy", "--dataset", path, "--warmup", "0", *ceilings]
    assert main(argv) == 0
    assert "NOT COLD (concurrency 1): " in capsys.readouterr().out
    assert main([*argv, "--warm_cache", "--no_streaming"]) == 0
    out = capsys.readouterr().out
    assert "NOT COLD" not in out and "TTFT" not in out and "end to end" in out


def test_a_sweep_over_a_server(
    server: RunningServer, tmp_path: Path, ceilings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    dataset = write_set(tmp_path, *({"task_id": i, "input_ids": [65 + i, 66], "output_tokens": 5} for i in range(6)))
    argv = ["bench", "serve", "--url", server.url, "--model", "fake", "--dataset", dataset, *ceilings]
    assert main([*argv, "--max_concurrency", "1,3", "--warmup", "0", "--report_json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["kind"] == "serve" and report["model"]["name"] == "fake"
    for level, calls in zip(report["levels"], (server.llm.calls[:6], server.llm.calls[6:]), strict=True):
        assert level["output_tokens"] == 30 and level["cache"]["share"] == 0
        assert len({call.prompt_ids[0] for call in calls}) == 6
        # Other prompts than the file's: the server may have seen those in an earlier run.
        assert all(call.prompt_ids[1] == 66 and len(call.prompt_ids) == 2 for call in calls)
    out, err = capsys.readouterr()
    assert "headrace bench serve: fake" in out and "Throughput" in out
    assert "No roofline: the model's shapes are not known here" in err


def test_requests_arrive_at_their_rate(server: RunningServer, tmp_path: Path, ceilings: list[str]) -> None:
    path = tmp_path / "r.json"
    argv = ["bench", "serve", "--url", server.url, "--endpoint", "chat", "--request_rate", "50", "--warmup", "0"]
    dataset = write_set(tmp_path, *({"prompt": f"Say {i}", "output_tokens": 4} for i in range(25)))
    argv += ["--burstiness", "50", "--dataset", dataset, *ceilings, "--report_json", str(path)]
    assert main(argv) == 0
    (level,) = json.loads(path.read_text())["levels"]
    assert level["request_rate"] == 50 and level["concurrency"] is None
    assert 0.35 < level["seconds"] < 1.5


def test_chat_needs_text(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = write_set(tmp_path, GOOD)
    argv = ["bench", "serve", "--url", server.url, "--endpoint", "chat", "--dataset", dataset, "--warmup", "0"]
    assert main(argv) == 2
    assert "chat takes text, and these requests are token ids" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    said = refused(["bench", "serve", "--url", f"127.0.0.1:{port}", "--report_json", str(tmp_path / "r.json")], capsys)
    assert said == f"headrace: Cannot reach http://127.0.0.1:{port}/v1: Connection refused.\n"
    assert json.loads((tmp_path / "r.json").read_text())["is_partial"]


def test_a_report_says_what_stopped_a_run_before_its_first_level(
    server: RunningServer, model: str, tmp_path: Path, ceilings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Token ids for an endpoint that takes text; a cache that cannot hold one request."""
    path = tmp_path / "r.json"
    serving = ["bench", "serve", "--url", server.url, "--endpoint", "chat", "--input_len", "8", *ceilings]
    loading = ["bench", "throughput", model, "--load_format", "dummy", "--input_len", "8", "--output_len", "8"]
    loading += ["--max_seq_len", "500", "--kv_cache_config.max_tokens", "64", *ceilings]
    for argv, why in ((serving, "chat takes text"), (loading, "max_seq_len (500) does not fit")):
        assert main([*argv, "--report_json", str(path)]) == 2
        assert why in capsys.readouterr().err
        report = json.loads(path.read_text())
        assert report["is_partial"] and why in report["partial_reason"] and report["levels"] == []


def test_a_server_that_dies_in_mid_run_leaves_what_was_measured(
    server: RunningServer, tmp_path: Path, ceilings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    dataset = write_set(tmp_path, *({"input_ids": [65, i], "output_tokens": 40} for i in range(200)))
    argv = ["bench", "serve", "--url", server.url, "--dataset", dataset, "--max_concurrency", "2,4", *ceilings]

    def die() -> None:
        while sum(call.is_finished for call in server.llm.calls) < 6:
            time.sleep(0.01)
        server.on_loop(server.llm.die, "the GPU melted")

    thread = threading.Thread(target=die)
    thread.start()
    assert main([*argv, "--report_json", str(path)]) == 1
    thread.join()
    report = json.loads(path.read_text())
    (level,) = report["levels"]
    assert report["is_partial"] and "the GPU melted" in report["partial_reason"]
    assert level["num_requests"] - level["num_failed"] >= 2 and level["num_unfinished"] > 100
    out, err = capsys.readouterr()
    assert "PARTIAL: the server's engine is dead" in out and "Throughput" in out
    assert err.splitlines()[-1].startswith("headrace: The run was cut short: the server's engine is dead")


def use_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of the engine's tests in place of the real one."""
    monkeypatch.setenv("PYTHONPATH", ENGINE_TESTS)
    core = CoreOptions(worker=f"fake_worker:{name}", device_facts="fake_worker:device_facts")
    monkeypatch.setattr(run_engine, "AsyncLLM", functools.partial(AsyncLLM, core=core))


def test_an_engine_that_dies_in_mid_run_leaves_what_was_measured(
    model: str, tmp_path: Path, ceilings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_worker("CrashesServing", monkeypatch)
    path = tmp_path / "r.json"
    argv = ["bench", "throughput", model, "--load_format", "dummy", "--warmup", "0", *ceilings]
    argv += ["--concurrency", "1", "--num_requests", "20"]
    assert main([*argv, "--input_len", "5", "--output_len", "1", "--report_json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["is_partial"] and "the device fell off the bus" in report["partial_reason"]
    (level,) = report["levels"]
    assert 1 <= level["num_requests"] < 10 and level["num_unfinished"] > 10
    out, err = capsys.readouterr()
    assert "PARTIAL: " in out and "The run was cut short: " in err


def test_ctrl_c_leaves_what_was_measured(
    model: str, tmp_path: Path, ceilings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_worker("SlowWorker", monkeypatch)
    path = tmp_path / "r.json"
    argv = ["bench", "throughput", model, "--load_format", "dummy", "--warmup", "0", *ceilings]
    argv += ["--concurrency", "2", "--num_requests", "500"]

    def interrupt() -> None:
        # The report has its model when the engine has started.
        while "engine" not in json.loads(path.read_text() if path.exists() else "{}"):
            time.sleep(0.02)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main([*argv, "--input_len", "5", "--output_len", "3", "--report_json", str(path)]) == 130
    thread.join()
    report = json.loads(path.read_text())
    assert report["is_partial"] and report["partial_reason"] == "stopped by Ctrl-C"
    assert 2 <= report["levels"][0]["num_requests"] < 300
    assert "PARTIAL: stopped by Ctrl-C" in capsys.readouterr().out


def test_two_reports_are_compared(
    server: RunningServer, tmp_path: Path, ceilings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_set(tmp_path, GOOD, {**GOOD, "input_ids": [9, 8]})
    paths = [str(tmp_path / name) for name in ("old.json", "new.json")]
    for path in paths:
        argv = ["bench", "serve", "--url", server.url, "--dataset", dataset, "--max_concurrency", "1", *ceilings]
        assert main([*argv, "--report_json", path]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", *paths, "--plot", str(tmp_path / "both.html")]) == 0
    out, err = capsys.readouterr()
    assert "old" in out and "new" in out and "output tok/s" in out and " x" in out
    assert "The picture is in " in err and "<polyline" in (tmp_path / "both.html").read_text()
