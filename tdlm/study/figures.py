"""The studies' figures as SVG files on white; without matplotlib there are none."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import write_bytes
from ..report.compare import can_draw
from ..report.dots import FILE
from ..report.figures import rendered
from ..report.read import number
from .collect import OFTEN, Row, cost, training_seconds

STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP"


def draw(path: Path, fill: Callable[[Any], None], shape: tuple[float, float]) -> Path | None:
    """The file, or None where nothing can draw."""
    if not can_draw():
        return None

    def filled(figure: Any) -> None:
        figure.set_facecolor(FILE.paper)
        fill(figure)

    write_bytes(path, rendered(filled, shape, path.stem, text="path"))
    return path


def style(place: int) -> dict[str, Any]:
    """Colour and dash of a run: eight colours, then the same with another dash and marker."""
    again = place // len(FILE.series)
    return {"color": FILE.series[place % len(FILE.series)], "linestyle": STYLES[again % len(STYLES)],
            "marker": MARKERS[again % len(MARKERS)]}


def costs_figure(path: Path, rows: Sequence[Row]) -> Path | None:
    """The validation bound against minutes, tokens and memory. A hollow point has seen the corpus more than four times."""
    rows = [row for row in rows if row.run.valid or row.run.headline]

    def fill(figure: Any) -> None:
        by_time, by_tokens, by_memory = figure.subplots(1, 3, sharey=True)
        for place, row in enumerate(rows):
            looks, found = style(place), cost(row)
            points = curve(row, found)
            for axis, column in ((by_time, 0), (by_tokens, 1)):
                axis.plot([point[column] for point in points], [point[2] for point in points], color=looks["color"],
                          linestyle=looks["linestyle"], linewidth=1.4, label=row.name if column == 0 else None)
                for point in points:
                    axis.plot([point[column]], [point[2]], looks["marker"], color=looks["color"], markersize=4,
                              fillstyle="none" if point[3] else "full")
            if found["memory"] is not None and found["bound"] is not None:
                by_memory.errorbar([found["memory"] / 2**30], [found["bound"]], yerr=[2 * (found["error"] or 0.0)],
                                   fmt=looks["marker"], color=looks["color"], markersize=6, capsize=3)
        for axis, name in ((by_time, "minutes of training"), (by_tokens, "million token positions"), (by_memory, "memory, GiB")):
            finish(axis, name)
        for axis in (by_time, by_tokens):
            axis.set_xlim(left=0)
        by_time.set_title("validation bound, nats per token", loc="left", color=FILE.muted, fontsize=10)
        figure.legend(loc="outside right center", frameon=False, fontsize=8)

    return draw(path, fill, (11.5, max(3.6, 0.19 * len(rows) + 0.8))) if rows else None


def curve(row: Row, found: dict[str, Any]) -> list[tuple[float, float, float, bool]]:
    """(minutes, millions of positions, bound, more than four epochs) at every validation; minutes from the line of the loss
    curve that was written at that step, or between two of them."""
    config, points = row.entry.config, []
    times = training_seconds(row.run.train)
    for line in row.run.valid:
        bound = number(line.get("bound"))
        if bound is None or not times:
            continue
        step = line["step"]
        epochs = (found["epochs"] or 0.0) * step / max(1, found["steps"] or 1)
        points.append((_at(times, step) / 60, step * config.train.batch * config.data.length / 1e6, bound, epochs > OFTEN))
    return points


def _at(times: list[tuple[float, float]], step: float) -> float:
    before = max((point for point in times if point[0] <= step), default=(0.0, 0.0))
    after = min((point for point in times if point[0] >= step), default=before)
    share = (step - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + share * (after[1] - before[1])


def finish(axis: Any, below: str) -> None:
    axis.set_xlabel(below, loc="right", color=FILE.muted)
    axis.grid(color=FILE.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FILE.grid)
    axis.tick_params(colors=FILE.muted, length=0)
