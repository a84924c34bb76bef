# SPDX-License-Identifier: Apache-2.0
"""Two or more reports side by side: each level that any has, the figures of all, and their ratio to the first."""

import os
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.bench.report import read_report
from headrace.bench.table import name_of, output_console
from headrace.errors import ConfigError

Named = tuple[str, dict[str, Any]]
LENGTHS_DIFFER = 0.02
"""Mean lengths may differ by this share, and the levels still count as the same work."""

FIGURES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("output tok/s", ("output_tokens_per_s",), True),
    ("requests/s", ("requests_per_s",), True),
    ("TTFT mean, ms", ("ttft_ms", "mean"), False),
    ("TTFT P99, ms", ("ttft_ms", "p99"), False),
    ("TPOT mean, ms", ("tpot_ms", "mean"), False),
    ("TPOT P99, ms", ("tpot_ms", "p99"), False),
    ("inter-token P99, ms", ("itl_ms", "p99"), False),
    ("end to end mean, ms", ("e2e_ms", "mean"), False),
    ("roofline, both", ("roofline", "closed_loop", "share"), True),
    ("cached", ("cache", "share"), True),
)
"""(name, where it stands in a level, whether more is better)."""


def load_reports(paths: Sequence[str]) -> list[Named]:
    """The reports with the names they are shown under.

    Raises:
        ConfigError: fewer than two, or a file that is no report.
    """
    if len(paths) < 2:
        raise ConfigError("compare needs two or more report files: headrace bench compare BEFORE.json AFTER.json.")
    reports = [read_report(path) for path in paths]
    return list(zip(_names(paths), reports, strict=True))


def print_comparison(reports: Sequence[Named], console: Console | None = None) -> None:
    """Show the table, and before it what makes the comparison unfair."""
    console = console or output_console()
    for warning in differences(reports):
        console.print(Panel(Text(warning, style="bold"), border_style="bold red", expand=False))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Side by side (times the first)", title_justify="left")
    table.add_column("level")
    table.add_column("")
    for name, _ in reports:
        table.add_column(name, justify="right", overflow="fold")
    for level in level_names(reports):
        _add_level(table, level, [_level(values, level) for _, values in reports])
    console.print(table)


def level_names(reports: Sequence[Named]) -> list[str]:
    """Every level that any report has, in the order of their appearance."""
    return list(dict.fromkeys(name_of(level) for _, values in reports for level in values["levels"]))


def differences(reports: Sequence[Named]) -> list[str]:
    """What the reports do not have in common, and each that is no clean measurement."""
    found = []
    machines = {name: values.get("machine", {}).get("name", "unknown") for name, values in reports}
    if len(set(machines.values())) > 1:
        found.append("DIFFERENT MACHINES: " + "; ".join(f"{name} on {machine}" for name, machine in machines.items()))
    for name, values in reports:
        if values["is_partial"]:
            found.append(f"PARTIAL: {name}: {values['partial_reason']}.")
        for level in values["levels"]:
            if level["cache"]["is_as_meant"] is False:
                share = 100 * level["cache"]["share"]
                found.append(f"NOT COLD: {name}, {name_of(level)}: {share:.1f}% of the prompt tokens were cached.")
            if level["num_failed"]:
                found.append(f"FAILED: {name}, {name_of(level)}: {level['num_failed']} of {level['num_requests']}.")
    for level_name in level_names(reports):
        found += _other_work(level_name, reports)
    return found


def _other_work(level_name: str, reports: Sequence[Named]) -> list[str]:
    levels = [(name, _level(values, level_name)) for name, values in reports]
    lengths = [(name, level["mean_input_len"], level["mean_output_len"]) for name, level in levels if level]
    first = lengths[0]
    for name, *here in lengths[1:]:
        for now, before in zip(here, first[1:], strict=True):
            if abs(now - before) > LENGTHS_DIFFER * max(before, 1.0):
                return [
                    f"DIFFERENT WORK at {level_name}: {first[0]} has {first[1]:.0f} prompt and {first[2]:.0f} output "
                    f"tokens on average, {name} {here[0]:.0f} and {here[1]:.0f}."
                ]
    return []


def _names(paths: Sequence[str]) -> list[str]:
    """File names without what they share; whole paths where that leaves two alike."""
    short = [os.path.basename(path).removesuffix(".json") for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


def _level(values: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((level for level in values["levels"] if name_of(level) == name), None)


def _add_level(table: Table, name: str, levels: Sequence[dict[str, Any] | None]) -> None:
    for label, path, more_is_better in FIGURES:
        figures = [_figure(level, path) for level in levels]
        if all(figure is None for figure in figures):
            continue
        is_share = path[-1] == "share"
        cells = [
            _cell(figure, figures[0] if index and path[0] != "cache" else None, is_share, more_is_better)
            for index, figure in enumerate(figures)
        ]
        table.add_row(name, label, *cells)
        name = ""
    table.add_section()


def _figure(level: dict[str, Any] | None, path: Sequence[str]) -> float | None:
    value: Any = level
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, (int, float)) else None


def _cell(figure: float | None, first: float | None, is_share: bool, more_is_better: bool) -> Text:
    if figure is None:
        return Text("-")
    text = Text(f"{100 * figure:.1f}%" if is_share else f"{figure:,.2f}")
    if first:
        ratio = figure / first
        is_better = (ratio > 1) == more_is_better
        style = "" if abs(ratio - 1) < 0.01 else "green" if is_better else "red"
        text.append(f" x{ratio:.2f}", style=style)
    return text
