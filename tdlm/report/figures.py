"""Curves, drawn with matplotlib and inlined as SVG: a wide one for screens and paper, a narrow one for phones.

Same numbers, same bytes: ids come from a fixed salt and no date is written. Colours are stand-ins for CSS variables.
"""
from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConfigError
from .colour import SERIES
from .svg import inline_svg

INK, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
WIDE, NARROW = (8.6, 3.7), (4.1, 3.5)  # inches; 72 SVG units each
POINTS = 400
DASHES = {"unigram": (0, (1, 2.2)), "bigram": (0, (5, 2.5)), "trigram": (0, (8, 2, 1.5, 2))}


@dataclass(frozen=True)
class Line:
    """One run, or one level, over the steps: a fine training line and validation points with error bars."""

    name: str
    colour: str
    train: tuple[np.ndarray, np.ndarray] | None = None
    valid: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    final: tuple[float, float, float] | None = None
    raw: bool = True


@dataclass(frozen=True)
class Chart:
    """What a figure of lines shows."""

    key: str
    title: str
    unit: str
    lines: Sequence[Line]
    levels: dict[str, float] = field(default_factory=dict)
    named: bool = False


def series(place: int) -> str:
    """The stand-in for --s0..--s7."""
    return f"#05{place % len(SERIES):02x}05"


def height_colour(height: int) -> str:
    """The stand-in for --h1, --h2, ..."""
    return f"#06{height:02x}06"


def _css() -> dict[str, str]:
    known = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)", PAPER: "var(--card)"}
    known |= {series(place): f"var(--s{place})" for place in range(len(SERIES))}
    return known | {height_colour(height): f"var(--h{height})" for height in range(1, 65)}


def thin(steps: np.ndarray, values: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` points, each the mean of its neighbours."""
    if len(steps) <= points:
        return steps, values
    edges = np.linspace(0, len(steps), points + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(steps)))
    return np.add.reduceat(steps, edges) / counts, np.add.reduceat(values, edges) / counts


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over a window that is centred, and shrinks towards the steep beginning so as not to bend it."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    reach = np.minimum(place, window // 2)
    end = np.minimum(place + reach + 1, len(values))
    return (total[end] - total[place - reach]) / (end - place + reach)


def window(count: int) -> int:
    return max(1, count // 20)


def line_chart(chart: Chart, prefix: str) -> str:
    """Lines over steps, wide and narrow."""
    return _both(chart.key, chart.title, prefix, lambda axes, narrow: _lines(axes, chart, narrow))


def stack_chart(key: str, title: str, steps: np.ndarray, levels: np.ndarray, prefix: str) -> str:
    """Levels (L, points) on top of one another: their sum is the bound."""

    def draw(axes: Any, narrow: bool) -> None:
        colours = [height_colour(level + 1) for level in range(len(levels))]
        axes.stackplot(steps, levels, colors=colours, edgecolor=PAPER, linewidth=0.8)
        axes.plot(steps, levels.sum(0), color=INK, linewidth=1.6)
        axes.set_xlim(steps[0], steps[-1])
        axes.set_ylim(0, None)
        _finish(axes, "nats per token", narrow)

    return _both(key, title, prefix, draw)


def _lines(axes: Any, chart: Chart, narrow: bool) -> None:
    low, high, right = _limits(chart)
    for line in chart.lines:
        if line.train is not None:
            steps, values = line.train
            if line.raw:
                axes.plot(*thin(steps, values), color=line.colour, linewidth=0.7, alpha=0.28)
            axes.plot(*thin(steps, smooth(values, window(len(values)))), color=line.colour, linewidth=1.7)
        if line.valid is not None:
            steps, values, errors = line.valid
            axes.errorbar(steps, values, yerr=errors, fmt="o", color=line.colour, markersize=4.8,
                          markeredgecolor=PAPER, markeredgewidth=0.7, elinewidth=1.1, capsize=2, zorder=4)
            if line.train is None:
                axes.plot(steps, values, color=line.colour, linewidth=1.3)
        if line.final is not None:
            step, value, error = line.final
            axes.errorbar([step], [value], yerr=[error], fmt="D", color=INK, markersize=5.5, markeredgecolor=PAPER,
                          markeredgewidth=1, elinewidth=1.3, capsize=3, zorder=5, clip_on=False)
        if chart.named:
            steps, values, *_ = line.valid or line.train or (np.zeros(1), np.zeros(1))
            axes.annotate(line.name, (steps[-1], values[-1]), xytext=(6, 0), textcoords="offset points",
                          va="center", color=INK, annotation_clip=False)
    above = math.inf
    for name, value in sorted(chart.levels.items(), key=lambda item: -item[1]):
        under = above - value < 0.09 * (high - low)  # the line above is so near that its label's place is taken
        axes.axhline(value, color=MUTED, linewidth=1.2, linestyle=DASHES.get(name, "-"), zorder=1)
        axes.annotate(f"{name} {value:.2f}", (1, value), xycoords=("axes fraction", "data"),
                      xytext=(-2, -3 if under else 3), textcoords="offset points",
                      ha="right", va="top" if under else "bottom", color=MUTED, zorder=6,
                      bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.5})
        above = value
    axes.set_xlim(0, right)
    if high > low:
        axes.set_ylim(low, high)
    _finish(axes, chart.unit, narrow)


def _limits(chart: Chart) -> tuple[float, float, float]:
    """Room for what matters: the first steps, far above the rest, may leave the picture at the top."""
    lows, highs, rights = list(chart.levels.values()), list(chart.levels.values()), [1.0]
    for line in chart.lines:
        if line.train is not None:
            steps, values = line.train
            values = smooth(values, window(len(values)))
            lows.append(float(values.min()))
            highs.append(float(values[len(values) // 25 :].max()))
            rights.append(float(steps[-1]))
        if line.valid is not None:
            lows.append(float((line.valid[1] - line.valid[2]).min()))
            highs.append(float((line.valid[1] + line.valid[2])[len(line.valid[1]) // 12 :].max()))
            rights.append(float(line.valid[0][-1]))
        if line.final is not None:
            lows.append(line.final[1])
            highs.append(line.final[1])  # it is never cut off: it would stand outside of the picture
            rights.append(line.final[0])
    low, high = min(lows, default=0.0), max(highs, default=1.0)
    room = 0.08 * (high - low) or 0.5
    return low - room, high + room, max(rights)


def _finish(axes: Any, unit: str, narrow: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(unit, loc="left", color=MUTED, fontsize=10, pad=8)
    axes.set_xlabel("step", loc="right", color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=MUTED, length=0)


def _both(key: str, title: str, prefix: str, draw: Callable[[Any, bool], None]) -> str:
    shapes = (("wide", WIDE, False), ("narrow", NARROW, True))
    return "".join(_draw(lambda axes, small=small: draw(axes, small), size, f"{prefix}-{key}-{css}", title, css)
                   for css, size, small in shapes)


def _draw(draw: Callable[[Any], None], size: tuple[float, float], prefix: str, title: str, css: str) -> str:
    def fill(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.set_facecolor("none")
        draw(axes)

    return page_svg(fill, size, prefix, title, css)


def page_svg(fill: Callable[[Any], None], size: tuple[float, float], prefix: str, title: str, css: str) -> str:
    """A figure of stand-in colours for the page: its text is the page's, its colours become variables."""
    drawn = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), rendered(fill, size, prefix).decode())
    return inline_svg(drawn, prefix, title=title, colours=_css(), css=css)


def rendered(fill: Callable[[Any], None], size: tuple[float, float], salt: str, *, form: str = "svg",
             text: str = "none") -> bytes:
    """A matplotlib figure as a file's content; `text="path"` draws letters as shapes, the same on every machine."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the report's figures need matplotlib, which is not installed; "
                          "pip install 'tdlm[plot]'") from None
    # Names of runs are plain text, not formulas.
    settings: dict[Any, Any] = {"svg.fonttype": text, "svg.hashsalt": salt, "text.parse_math": False,
                                "font.size": 10, "font.family": "sans-serif", "path.simplify": True}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **settings}):
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        FigureCanvasAgg(figure)
        fill(figure)
        held = io.BytesIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None} if form == "svg" else {"Software": None}
        figure.savefig(held, format=form, dpi=160, metadata=nothing)
    return held.getvalue()
