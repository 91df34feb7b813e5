"""From metric lines to figures: the bound and the loss over the steps, and the bound level by level."""
from __future__ import annotations

from typing import Any

import numpy as np

from .bars import Bar, bars
from .figures import Chart, Line, height_colour, line_chart, series, smooth, stack_chart, window
from .read import Run, number, numbers
from .text import esc, fixed, plus_minus


def points(lines: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps and values of the lines that hold a finite number under `key`."""
    found = [(float(line["step"]), value) for line in lines if (value := number(line.get(key))) is not None]
    return (np.array([step for step, _ in found]), np.array([value for _, value in found])) if found else None


def level_points(lines: list[dict[str, Any]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Steps and values of every level; a training batch may have missed a level (null in the file)."""
    found = [(float(line["step"]), line["levels"]) for line in lines if isinstance(line.get("levels"), list)]
    count = len(found[-1][1]) if found else 0
    held: list[tuple[np.ndarray, np.ndarray]] = []
    for level in range(count):
        pairs = [(step, value) for step, values in found
                 if len(values) == count and (value := number(values[level])) is not None]
        held.append((np.array([step for step, _ in pairs]), np.array([value for _, value in pairs])))
    return held if all(len(steps) for steps, _ in held) else []


def bound_figure(run: Run, prefix: str) -> str:
    """The bound: training noise smoothed, validation with error bars, the n-gram models as levels to pass."""
    valid = None
    if (found := points(run.valid, "bound")) is not None:
        errors = [number(line.get("error")) or 0.0 for line in run.valid if number(line.get("bound")) is not None]
        valid = (*found, np.array(errors))
    final = None
    if run.eval is not None and number(run.eval.get("bound")) is not None and number(run.eval.get("step")) is not None:
        final = (float(run.eval["step"]), float(run.eval["bound"]), number(run.eval.get("error")) or 0.0)
    train = points(run.train, "bound")
    if train is None and valid is None:
        return ""
    line = Line("bound", series(0), train=train, valid=valid, final=final)
    chart = Chart("bound", "Bound over the steps of training", "bound, nats per token", [line], run.ngrams)
    key = ('<p class="legend"><span><i class="stroke s0"></i>training batches, smoothed</span>'
           '<span><i class="dot s0"></i>validation</span>'
           + ('<span><i class="diamond"></i>final evaluation</span>' if final else "") + "</p>")
    return (f'<figure class="plot">{key}{line_chart(chart, prefix)}<figcaption>Lower is better. Error bars are one '
            "Monte-Carlo standard error. Dashed: models that only count, on the same tokens as the final evaluation."
            "</figcaption></figure>")


def loss_figure(run: Run, prefix: str) -> str:
    """What the optimizer saw. Another scale than the bound, so another figure."""
    found = points(run.train, "loss")
    if found is None:
        return ""
    line = Line("loss", series(6), train=found)
    drawn = line_chart(Chart("loss", "Training loss over the steps", "training loss", [line]), prefix)
    return (f'<figure class="plot">{drawn}<figcaption>The training loss clips and reweights the noise levels and may '
            "count PAD: it is what is minimised, and no number to publish.</figcaption></figure>")


def levels_figures(run: Run, prefix: str) -> str:
    """Each level's part of the bound over training, on its own and stacked."""
    validated, trained = level_points(run.valid), level_points(run.train)
    count = len(trained or validated)
    if not count:
        return ""
    lines = []
    for level in range(count):
        valid = (*validated[level], np.zeros(len(validated[level][0]))) if len(validated) == count else None
        lines.append(Line(f"level {level}", height_colour(level + 1), train=trained[level] if trained else None,
                          valid=valid, raw=count <= 4))
    raw = line_chart(Chart("levels", "Bound per level", "nats per token, each level", lines), prefix)
    smoothed = [(steps, smooth(values, window(len(values)) if trained else 1))
                for steps, values in trained or validated]
    start, end = max(steps[0] for steps, _ in smoothed), min(steps[-1] for steps, _ in smoothed)
    stacked = ""
    if end > start:
        grid = np.linspace(start, end, 150)
        values = np.stack([np.interp(grid, steps, values) for steps, values in smoothed])
        drawn = stack_chart("stack", "Bound per level, stacked", grid, values, prefix)
        stacked = f'<figure class="plot">{drawn}<figcaption>Stacked: the upper edge is the bound.</figcaption></figure>'
    key = "".join(f'<span><i class="swatch h{level + 1}"></i>{_level_name(level, count)}</span>'
                  for level in range(count))
    return (f'<p class="legend">{key}</p><div class="pair"><figure class="plot">{raw}<figcaption>Each level by itself.'
            f"</figcaption></figure>{stacked}</div>")


def _level_name(level: int, count: int) -> str:
    ends = {0: " (group to word)" if count > 1 else " (nothing to word)", count - 1: " (nothing to group)"}
    name = f"level {level}{ends[0] if level == 0 else ends.get(level, '')}"
    return esc(name)


def level_bars(run: Run, link: str) -> str:
    """The levels of the final evaluation."""
    head = run.headline or {}
    values, errors = numbers(head.get("levels")), numbers(head.get("level_errors"))
    if not values:
        return ""
    total = sum(values) or 1.0
    rows = []
    for level, value in reversed(list(enumerate(values))):
        error = errors[level] if len(errors) == len(values) else 0.0
        text = f"{plus_minus(value, error)} ({100 * value / total:.0f}%)"
        rows.append(Bar(_level_name(level, len(values)), value, error, f"h{level + 1}", text, link))
    return bars(rows, caption=f"Where the {fixed(total)} nats per token are paid, coarse to fine")
