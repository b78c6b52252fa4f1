"""Plots as inline SVG: quality against bytes, time against bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

PALETTE = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#e08e0b", "#3f3f3f", "#17a2a2", "#a0522d")


@dataclass(frozen=True)
class Point:
    """One run of a line: position, and the interval of y where known."""

    x: float
    y: float
    ci: tuple[float, float] | None = None


def svg(
    lines: Sequence[tuple[str, Sequence[Point]]],
    title: str,
    x_label: str,
    y_label: str,
) -> str:
    """One line with error bars for each policy, as an SVG element for a page.

    Args:
        lines: (policy, its points); points are joined in order of x.
        title: of the plot.
        x_label: with unit.
        y_label: with unit.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for at, (name, points) in enumerate(lines):
        ordered = sorted(points, key=lambda point: point.x)
        x, y = [point.x for point in ordered], [point.y for point in ordered]
        ends = [point.ci or (point.y, point.y) for point in ordered]
        below = [max(0.0, point.y - low) for point, (low, _) in zip(ordered, ends, strict=True)]
        above = [max(0.0, high - point.y) for point, (_, high) in zip(ordered, ends, strict=True)]
        axes.errorbar(x, y, yerr=[below, above], marker="o", capsize=3, color=PALETTE[at % len(PALETTE)], label=name)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    out = io.StringIO()
    with rc_context({"svg.hashsalt": title}):  # with no date either: the same record, the same page
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
