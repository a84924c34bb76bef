# SPDX-License-Identifier: Apache-2.0
"""Throughput against latency over a sweep: PNG by matplotlib where that is installed, SVG and HTML by hand."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.utils.lazy import require

WIDTH, HEIGHT = 760, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 30, 50, 60
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
NUM_TICKS = 6
SUFFIXES = (".png", ".svg", ".html")


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Curve:
    """The levels of one report."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Axes:
    title: str
    x: str
    y: str


def check_plot(path: str | None) -> None:
    """Raises ConfigError for a file that no picture can be written to, before anything is measured."""
    if path is None:
        return
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError(f"plot {path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}.", param="plot")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"plot {path}: the folder {Path(path).absolute().parent} does not exist.", param="plot")


def draw(reports: Sequence[tuple[str, dict[str, Any]]], path: str) -> Path:
    """Draw reports, each with a name, and return the file: another than asked for where a PNG cannot be made here."""
    curves, axes = curves_of(reports)
    file = Path(path)
    if file.suffix.lower() == ".png":
        try:
            _draw_png(curves, axes, file)
            return file
        except ConfigError:
            # matplotlib is not installed; a picture that any browser shows is better than none.
            file = file.with_suffix(".html")
    svg = as_svg(curves, axes)
    text = svg if file.suffix.lower() == ".svg" else f"<!doctype html>\n<meta charset=utf-8>\n{_page(axes, svg)}\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"plot {file} cannot be written: {error.strerror}.", param="plot") from None
    return file


def curves_of(reports: Sequence[tuple[str, dict[str, Any]]]) -> tuple[list[Curve], Axes]:
    """Output tokens per second and GPU, over the mean TPOT; over that of whole answers where any was not streamed."""
    every = [level for _, values in reports for level in values["levels"]]
    key, label = ("tpot_ms", "TPOT") if all(level["tpot_ms"] for level in every) else ("e2e_ms", "end to end")
    curves = []
    for name, values in reports:
        points = [
            Point(level[key]["mean"], level["output_tokens_per_s_per_gpu"], _point_label(level))
            for level in values["levels"]
            if level[key]
        ]
        if points:
            curves.append(Curve(name, tuple(points)))
    if not curves:
        raise ConfigError("There is nothing to draw: no request was answered.", param="plot")
    return curves, Axes("Throughput against latency, by concurrency", f"{label}, mean, ms", "output tokens/s per GPU")


def _point_label(level: dict[str, Any]) -> str:
    rate = level.get("request_rate")
    return str(level["concurrency"] or (f"{rate:g}/s" if rate else ""))


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to just over the highest."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / (NUM_TICKS - 1)
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough)
    return [index * step for index in range(math.ceil(highest / step) + 1)]


def as_svg(curves: Sequence[Curve], axes: Axes) -> str:
    """A picture that needs nothing else."""
    points = [point for curve in curves for point in curve.points]
    x_ticks, y_ticks = ticks(max(point.x for point in points)), ticks(max(point.y for point in points))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + width * x / x_ticks[-1], TOP + height * (1 - y / y_ticks[-1])

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 24, axes.title, "middle", 15),
        _text(LEFT + width / 2, HEIGHT - 14, axes.x, "middle"),
        f'<g transform="translate(18,{TOP + height / 2}) rotate(-90)">{_text(0, 0, axes.y, "middle")}</g>',
    ]
    for tick in x_ticks:
        x, y = place(tick, 0)
        out += [_line(x, TOP, x, y), _text(x, y + 18, f"{tick:,g}", "middle")]
    for tick in y_ticks:
        x, y = place(0, tick)
        out += [_line(x, y, LEFT + width, y), _text(x - 8, y + 4, f"{tick:,g}", "end")]
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        places = [place(point.x, point.y) for point in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), point in zip(places, curve.points, strict=True):
            hint = f"{point.label}: {point.y:,.1f} tokens/s per GPU, {point.x:,.2f} ms"
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{_hint(hint)}</circle>')
            out.append(_text(x + 7, y - 7, point.label, "start"))
        out.append(
            f'<rect x="{LEFT + width - 200}" y="{TOP + 8 + 20 * index}" width="12" height="12" fill="{colour}"/>'
        )
        out.append(_text(LEFT + width - 182, TOP + 18 + 20 * index, curve.name[:32], "start"))
    return "\n".join([*out, "</svg>"])


def _hint(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _page(axes: Axes, svg: str) -> str:
    return f"<title>{html.escape(axes.title)}</title>\n<body>\n{svg}\n</body>"


def _draw_png(curves: Sequence[Curve], axes: Axes, file: Path) -> None:
    require("matplotlib", extra="plot", purpose="A PNG")
    figures = require("matplotlib.figure")
    figure = figures.Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150)
    plot = figure.subplots()
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        xs, ys = [point.x for point in curve.points], [point.y for point in curve.points]
        plot.plot(xs, ys, marker="o", color=colour, label=curve.name)
        for point in curve.points:
            plot.annotate(point.label, (point.x, point.y), textcoords="offset points", xytext=(6, 6))
    plot.set_title(axes.title)
    plot.set_xlabel(axes.x)
    plot.set_ylabel(axes.y)
    plot.set_xlim(left=0)
    plot.set_ylim(bottom=0)
    plot.grid(True, alpha=0.4)
    plot.legend()
    try:
        figure.savefig(file)
    except OSError as error:
        raise ConfigError(f"plot {file} cannot be written: {error.strerror}.", param="plot") from None
