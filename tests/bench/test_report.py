# SPDX-License-Identifier: Apache-2.0
"""Reports: the file, what a person is shown, two side by side, the picture."""

import importlib.util
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.bench.compare import differences, load_reports, print_comparison
from headrace.bench.dataset import BenchRequest
from headrace.bench.load import Record
from headrace.bench.plot import check_plot, draw, ticks
from headrace.bench.report import Report, read_report
from headrace.bench.summary import summarize
from headrace.bench.table import print_report
from headrace.errors import ConfigError
from headrace.worker.trace import Activity
from headrace.worker.trace import summarize as summarize_trace


def level(concurrency: int | None, *, scale: float = 1.0, cached: int = 0, prompt: int = 100) -> dict[str, Any]:
    """Two requests of 11 tokens each, one after the other."""
    records = []
    for number in range(2):
        begun = number * 2.0 * scale
        arrivals = [begun + scale * (0.5 + 0.1 * i) for i in range(11)]
        made = Record(BenchRequest(number, 11, (1,) * prompt), begun, arrivals, arrivals[-1], prompt, 11, cached)
        records.append(made)
    values = summarize(records, 4.0 * scale, concurrency=concurrency, is_meant_cold=True)
    return values | {"num_unfinished": 0, "request_rate": None, "steps": None, "gpu": None, "trace": None}


def report(path: Path, *levels: dict[str, Any], why: str | None = None, **values: Any) -> str:
    made = Report("throughput", str(path))
    for each in levels:
        made.add(each)
    made.values |= {"model": {"name": "a-model"}, "machine": {"name": "a card"}, **values}
    made.end(why)
    return str(path)


def shown(print_it: Any, *args: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_it(*args, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_file_is_there_and_partial_from_the_start_and_whole_after_each_level(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    made = Report("serve", str(path))
    assert json.loads(path.read_text())["is_partial"] is True
    made.add(level(1))
    values = json.loads(path.read_text())
    assert values["is_partial"] and len(values["levels"]) == 1
    made.add(level(2))
    made.end()
    values = read_report(str(path))
    assert not values["is_partial"] and [each["concurrency"] for each in values["levels"]] == [1, 2]
    assert values["versions"]["headrace"] and values["command"].startswith("headrace")
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    made = Report("serve", str(tmp_path / "r.json"))
    made.add(level(1) | {"x": float("nan"), "y": [float("inf")]})
    (read,) = read_report(str(tmp_path / "r.json"))["levels"]
    assert read["x"] is None and read["y"] == [None]


def test_a_file_that_cannot_be_written_is_found_out_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^report_json /no/such/r.json cannot be written: No such file"):
        Report("serve", "/no/such/r.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is no report of `headrace bench`"),
        ('{"levels": []}', "is no report"),
        (
            '{"format": "headrace-bench-1", "levels": [], "partial_reason": "it broke"}',
            r"no level: .*\(it broke\)",
        ),
    ],
)
def test_what_is_no_report_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_report(str(tmp_path / "r.json"))


def test_the_terminal_shows_every_latency_and_throughput(tmp_path: Path) -> None:
    text = shown(print_report, read_report(report(tmp_path / "r.json", level(1), level(8))))
    assert "a-model" in text and "on a card" in text
    for word in ("TTFT", "TPOT", "inter-token", "end to end", "P50", "P90", "P95", "P99", "output tok/s", "per GPU"):
        assert word in text
    # 22 tokens in 4 s; TPOT 100 ms.
    assert "5.5" in text and "100.00" in text
    assert "NOT COLD" not in text and "PARTIAL" not in text


def test_a_run_that_was_not_cold_is_marked_loudly(tmp_path: Path) -> None:
    text = shown(print_report, read_report(report(tmp_path / "r.json", level(1), level(8, cached=25))))
    assert "NOT COLD (concurrency 8): 25.0% of the prompt tokens came from the prefix cache" in text
    assert "NOT COLD (concurrency 1)" not in text


def test_a_partial_report_and_failed_requests_are_marked(tmp_path: Path) -> None:
    failed = level(1) | {"num_failed": 1, "errors": [{"error": "no room", "count": 1}]}
    text = shown(print_report, read_report(report(tmp_path / "r.json", failed, why="the server is gone")))
    assert "PARTIAL: the server is gone." in text
    assert "FAILED (concurrency 1): 1 of 2 requests: 1 x no room" in text


def test_the_split_of_a_step_and_its_trace_are_shown(tmp_path: Path) -> None:
    activities = [Activity("a_kernel", 0, 40_000, 40_000), Activity("b_kernel", 90_000, 100_000, 10_000)]
    trace = {"sequences": 4, **summarize_trace(activities, 1, "cuda")}
    steps = {"num_steps": 7, "wall_ms": 1.5, "host_ms": 0.25, "wait_ms": 1.25}
    text = shown(print_report, read_report(report(tmp_path / "r.json", level(4) | {"trace": trace, "steps": steps})))
    assert "GPU busy" in text and "GPU idle" in text
    assert "0.050" in text and "0.250" in text and "1.250" in text
    assert "Trace of 1 steps, 4 sequences on cuda" in text
    row = next(line for line in text.splitlines() if "a_kernel" in line and "b_kernel" in line)
    assert row.split()[-1] == "50.0"


def test_two_reports_stand_side_by_side_with_their_ratio(tmp_path: Path) -> None:
    paths = [report(tmp_path / "old.json", level(1), level(8)), report(tmp_path / "new.json", level(1, scale=0.5))]
    text = shown(print_comparison, load_reports(paths))
    lines = [line.split() for line in text.splitlines()]
    assert ["old", "new"] in [line[-2:] for line in lines]
    assert ["output", "tok/s", "5.50", "11.00", "x2.00"] in [line[-5:] for line in lines]
    assert ["TPOT", "mean,", "ms", "100.00", "50.00", "x0.50"] in [line[-6:] for line in lines]
    # The second has no level of 8.
    assert ["5.50", "-"] in [line[-2:] for line in lines]


def test_what_makes_a_comparison_unfair_is_said(tmp_path: Path) -> None:
    reports = load_reports(
        [
            report(tmp_path / "a.json", level(1)),
            report(tmp_path / "b.json", level(1, prompt=200, cached=50), machine={"name": "another"}, why="Ctrl-C"),
        ]
    )
    said = "\n".join(differences(reports))
    assert "DIFFERENT MACHINES: a on a card; b on another" in said
    assert "PARTIAL: b: Ctrl-C." in said
    assert "NOT COLD: b, concurrency 1: 25.0%" in said
    assert "DIFFERENT WORK at concurrency 1: a has 100 prompt and 11 output tokens on average, b 200 and 11." in said
    assert differences(load_reports([str(tmp_path / "a.json")] * 2)) == []


def test_one_report_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compare needs two or more report files"):
        load_reports([report(tmp_path / "a.json", level(1))])


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_picture_needs_nothing_else(suffix: str, tmp_path: Path) -> None:
    reports = load_reports(
        [report(tmp_path / "a.json", level(1), level(8)), report(tmp_path / "<b>.json", level(1, scale=0.5))]
    )
    file = draw(reports, str(tmp_path / f"p.{suffix}"))
    text = file.read_text()
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    tag = "{http://www.w3.org/2000/svg}"
    assert len(svg.findall(f"{tag}circle")) == 3
    assert len(svg.findall(f"{tag}polyline")) == 2
    words = [element.text for element in svg.iter(f"{tag}text")]
    assert {"1", "8", "a", "<b>", "TPOT, mean, ms", "output tokens/s per GPU"} <= set(words)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_png_is_a_png_or_a_page_where_that_cannot_be_made(tmp_path: Path) -> None:
    reports = load_reports([report(tmp_path / "a.json", level(1))] * 2)
    file = draw(reports, str(tmp_path / "p.png"))
    if importlib.util.find_spec("matplotlib") is None:
        assert file.name == "p.html" and "<svg" in file.read_text()
    else:
        assert file.name == "p.png" and file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_whole_answers_has_their_latency(tmp_path: Path) -> None:
    whole = level(1) | {"tpot_ms": None}
    reports = load_reports([report(tmp_path / "a.json", level(1)), report(tmp_path / "b.json", whole)])
    assert "end to end, mean, ms" in draw(reports, str(tmp_path / "p.svg")).read_text()


def test_a_picture_that_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    check_plot(None)
    check_plot(str(tmp_path / "x.PNG"))
    with pytest.raises(ConfigError, match=r"plot x.pdf must end in .png, .svg or .html\."):
        check_plot("x.pdf")
    with pytest.raises(ConfigError, match="the folder /no/such does not exist"):
        check_plot("/no/such/x.svg")


@pytest.mark.parametrize(
    ("highest", "expected"), [(95.0, [0, 20, 40, 60, 80, 100]), (0.0, [0, 1]), (1000.0, [0, 200, 400, 600, 800, 1000])]
)
def test_axes_have_round_numbers(highest: float, expected: list[float]) -> None:
    assert ticks(highest) == expected
