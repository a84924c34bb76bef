# SPDX-License-Identifier: Apache-2.0
"""A report on the terminal: what was run, throughput, latencies, the roofline, where a step's time went."""

from collections.abc import Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.bench.summary import PERCENTILES

LATENCIES = (
    ("ttft_ms", "TTFT"),
    ("ttft_after_first_ms", "TTFT, steady"),
    ("tpot_ms", "TPOT"),
    ("itl_ms", "inter-token"),
    ("e2e_ms", "end to end"),
)
NUM_KERNELS, NUM_PLACES, NUM_PHASES = 6, 3, 4
NAME_WIDTH = 56
WIDTH = 120
IN_FLIGHT = "in flight"
LEFT_COLUMNS = ("", "phase", "before")


def print_report(values: dict[str, Any], console: Console | None = None) -> None:
    """Show a report on standard output, warnings first."""
    console = console or output_console()
    for warning in warnings_of(values):
        console.print(Panel(Text(warning, style="bold"), border_style="bold red", expand=False))
    for line in heading(values):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    levels = values["levels"]
    if not levels:
        return
    for table in (_throughput(levels), _latencies(levels), _roofline(levels), _steps(levels)):
        if table.row_count:
            console.print(table)
    for level in levels:
        if level.get("trace"):
            for part in _trace(level):
                console.print(part)


def output_console() -> Console:
    """Standard output; in a file or a pipe as wide as the tables are."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def warnings_of(values: dict[str, Any]) -> list[str]:
    """What must not be overlooked."""
    found = []
    if values["is_partial"]:
        found.append(f"PARTIAL: {values['partial_reason']}. What had been measured by then is below.")
    for level in values["levels"]:
        cache = level["cache"]
        where = name_of(level)
        if cache["is_as_meant"] is False:
            found.append(
                f"NOT COLD ({where}): {100 * cache['share']:.1f}% of the prompt tokens came from the prefix cache. "
                "The figures are not those of a cold run."
            )
        if level["num_failed"]:
            reasons = "; ".join(f"{entry['count']} x {entry['error']}" for entry in level["errors"])
            found.append(f"FAILED ({where}): {level['num_failed']} of {level['num_requests']} requests: {reasons}")
    return found


def name_of(level: dict[str, Any]) -> str:
    """What tells a level from the others."""
    rate = f"{level['request_rate']:g}/s" if level.get("request_rate") else ""
    limit = "no limit" if level["concurrency"] is None else f"concurrency {level['concurrency']}"
    return ", ".join(part for part in (limit, rate) if part)


def short_name(level: dict[str, Any]) -> str:
    """The same in a few characters."""
    rate = f", {level['request_rate']:g}/s" if level.get("request_rate") else ""
    return f"{level['concurrency'] or 'no limit'}{rate}"


def heading(values: dict[str, Any]) -> list[str]:
    """What was measured, and on what, a line each."""
    machine, model = values.get("machine", {}), values.get("model") or {}
    engine, ceilings = values.get("engine") or {}, values.get("ceilings")
    lines = [f"headrace bench {values['kind']}: {model.get('name', 'no model')}" + _words(model, engine)]
    clocks = _clocks(values["levels"])
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    lines.append(f"on {machine.get('name', 'an unknown machine')}{driver}{clocks}")
    if ceilings:
        rates = ", ".join(f"{dtype} {_flops(rate)}" for dtype, rate in ceilings["matrix_flops"].items())
        attention = ceilings.get("attention_flops")
        more = f", attention {_flops(attention)}" if attention else ""
        read = ceilings["read_bytes_per_s"] / 1e9
        lines.append(f"ceilings measured here: read {read:,.0f} GB/s, {rates}{more}")
    memory = values.get("memory")
    if memory:
        peak, total = memory["peak_bytes"] / 2**30, memory["total_bytes"] / 2**30
        lines.append(f"peak memory {peak:.2f} of {total:.2f} GiB")
    startup = values.get("startup")
    if startup:
        longest = sorted(startup, key=lambda phase: -startup[phase])[:NUM_PHASES]
        named = ", ".join(f"{phase} {startup[phase]:.1f}" for phase in longest)
        lines.append(f"start {sum(startup.values()):.1f} s: {named}")
    versions = ", ".join(f"{name} {version}" for name, version in values.get("versions", {}).items())
    sha, plus, changes = (values.get("commit") or "").partition("+")
    commit = f", commit {sha[:12]}{plus}{changes}" if sha else ""
    return [*lines, f"{versions}{commit}", f"$ {values.get('command', '')}"]


def _words(model: dict[str, Any], engine: dict[str, Any]) -> str:
    words = [
        model.get("dtype"),
        "random weights" if model.get("is_random") else None,
        f"attention {engine['attn_backend']}" if engine.get("attn_backend") else None,
        f"max_batch_size {engine['max_batch_size']}" if engine.get("max_batch_size") else None,
        f"max_num_tokens {engine['max_num_tokens']}" if engine.get("max_num_tokens") else None,
    ]
    return "".join(f", {word}" for word in words if word)


def _clocks(levels: Sequence[dict[str, Any]]) -> str:
    seen = [level["gpu"] for level in levels if level.get("gpu")]
    if not seen:
        return ""
    low = min(gpu["sm_clock_mhz"]["min"] for gpu in seen)
    high = max(gpu["sm_clock_mhz"]["max"] for gpu in seen)
    return f", clocks {low:.0f} to {high:.0f} MHz, up to {max(gpu['power_w']['max'] for gpu in seen):.0f} W"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if index == 0 or column in LEFT_COLUMNS else "right"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _throughput(levels: Sequence[dict[str, Any]]) -> Table:
    columns = ("requests", "s", "requests/s", "output tok/s", "total tok/s", "per user", "per GPU", "ISL/OSL", "cached")
    table = _table("Throughput", (IN_FLIGHT, *columns))
    for level in levels:
        share = level["cache"]["share"]
        is_loud = level["cache"]["is_as_meant"] is False
        table.add_row(
            short_name(level),
            f"{level['num_requests'] - level['num_failed']:,}",
            f"{level['seconds']:.1f}",
            f"{level['requests_per_s']:,.2f}",
            f"{level['output_tokens_per_s']:,.1f}",
            f"{level['total_tokens_per_s']:,.1f}",
            f"{level['output_tokens_per_s_per_user']:,.1f}",
            f"{level['output_tokens_per_s_per_gpu']:,.1f}",
            f"{level['mean_input_len']:.0f}/{level['mean_output_len']:.0f}",
            Text("not said" if share is None else f"{100 * share:.1f}%", style="bold red" if is_loud else ""),
        )
    return table


def _latencies(levels: Sequence[dict[str, Any]]) -> Table:
    table = _table("Latency, ms", (IN_FLIGHT, "", "mean", *(f"P{share}" for share in PERCENTILES), "max"))
    for level in levels:
        first = True
        for key, label in LATENCIES:
            spread = level.get(key)
            if spread is not None:
                figures = [spread["mean"], *(spread[f"p{share}"] for share in PERCENTILES), spread["max"]]
                table.add_row(short_name(level) if first else "", label, *(f"{value:,.2f}" for value in figures))
                first = False
    return table


def _roofline(levels: Sequence[dict[str, Any]]) -> Table:
    table = _table("Share of the roofline", (IN_FLIGHT, "phase", "best possible", "measured", "share", "bound by"))
    for level in levels:
        roofline = level.get("roofline")
        if not roofline:
            continue
        name = short_name(level)
        for phase, what in (("decode", "a step"), ("prefill", "a prompt")):
            entry = roofline[phase]
            measured = "waits for others" if entry["measured_ms"] is None else f"{entry['measured_ms']:,.2f} ms"
            ideal = f"{entry['ideal_ms']:,.2f} ms"
            table.add_row(name, f"{phase}, {what}", ideal, measured, _percent(entry["share"]), entry["bound"])
            name = ""
        loop = roofline["closed_loop"]
        best, measured = loop["ideal_output_tokens_per_s"], loop["measured_output_tokens_per_s"]
        table.add_row(name, "both", f"{best:,.0f} tok/s", f"{measured:,.0f} tok/s", _percent(loop["share"]), "")
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _steps(levels: Sequence[dict[str, Any]]) -> Table:
    on_gpu = any(level["trace"] and level["trace"]["device"] == "cuda" for level in levels)
    device = "GPU" if on_gpu else "device"
    columns = ("steps", "a step", "host", "waiting", f"{device} busy", f"{device} idle", "gap P99", "longest", "> 30")
    title = "Where a step's time goes: ms; of traced decode steps the device, and the gaps of it in microseconds"
    table = _table(title, (IN_FLIGHT, *columns))
    for level in levels:
        steps, trace = level.get("steps"), level.get("trace")
        if not steps and not trace:
            continue
        gaps = trace["gaps"] if trace else None
        table.add_row(
            short_name(level),
            *_columns(steps, ("num_steps", "{:,.0f}"), ("wall_ms", "{:.3f}")),
            *_columns(steps, ("host_ms", "{:.3f}"), ("wait_ms", "{:.3f}")),
            *_columns(trace, ("busy_ms_per_step", "{:.3f}"), ("idle_ms_per_step", "{:.3f}")),
            *_columns(gaps, ("p99_us", "{:.1f}"), ("max_us", "{:.1f}"), ("num_over", "{:,.0f}")),
        )
    return table


def _columns(values: dict[str, Any] | None, *wanted: tuple[str, str]) -> list[str]:
    return ["" if values is None else shape.format(values[name]) for name, shape in wanted]


def _trace(level: dict[str, Any]) -> list[Table]:
    """What ran longest, and where the device waited longest."""
    trace = level["trace"]
    title = f"Trace of {trace['num_steps']} steps, {trace['sequences']} sequences on {trace['device']}"
    kernels = _table(title, ("activity", "each, us", "a step, us", "share"))
    for entry in trace["kernels"][:NUM_KERNELS]:
        share = _percent(entry["share"])
        kernels.add_row(_short(entry["name"]), f"{entry['mean_us']:,.1f}", f"{entry['us_per_step']:,.1f}", share)
    places = _table("Longest waits of the device", ("after", "before", "times", "longest, us", "in all, us"))
    for entry in trace["gaps"]["places"][:NUM_PLACES]:
        row = (f"{entry['count']:,}", f"{entry['max_us']:,.1f}", f"{entry['total_us']:,.1f}")
        places.add_row(_short(entry["before"]), _short(entry["after"]), *row)
    return [table for table in (kernels, places) if table.row_count]


def _short(name: str) -> Text:
    return Text(name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}...")
