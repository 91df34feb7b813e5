"""The bound by level: where in the tree the nats are paid; and the training weights by level.

Levels are counted from the leaves (0) to the root (H - 1), as everywhere. Those of different trees stand for different decisions:
only their sums compare. Levels of the overlapping process depend on when they are asked for as well, and do not compare with
those of the cascade.
"""
from __future__ import annotations

from typing import Any

from ..objectives.tree import level_weights
from ..report.colour import ramp
from ..report.dots import FILE
from ..report.read import numbers
from ..report.text import fixed
from .collect import Collection, Row, grid
from .figures import draw, finish, style

WEIGHTS = (("none", 0.0), ("linear", 0.5), ("linear", 1.0), ("linear", 3.0), ("exponential", 0.05), ("exponential", 0.1),
           ("exponential", 0.3))
"""The paper names exponential 0.3 only; the others lie around what its figures show."""
HEIGHT = 16
"""Of the drawn curves: a tree of K=2 over 50,258 tokens is at least so high."""


def level_bounds(found: Collection) -> dict[str, Any]:
    """A table of levels, the stacked bars and the raw curves of the paper's figure."""
    rows = [row for row in found.rows if len(_levels(row)) > 0]
    if not rows:
        return {}
    most = max(len(_levels(row)) for row in rows)
    columns = [("run", [row.name for row in rows]), ("levels", [str(len(_levels(row))) for row in rows]),
               ("sum", [fixed(sum(_levels(row)), 3) for row in rows])]
    columns += [(f"level {level}" + (" (leaf)" if level == 0 else ""),
                 [fixed(_levels(row)[level], 3) if level < len(_levels(row)) else "" for row in rows]) for level in range(most)]
    text = ["## The bound by level", "", grid(columns),
            "Levels of different trees are different decisions; only their sums compare."]
    pictures = [draw(found.file("-stacked.svg"), lambda figure: _stacked(figure, rows), (7.6, 1.2 + 0.36 * len(rows))),
                draw(found.file("-raw.svg"), lambda figure: _raw(figure, rows), (7.6, 4.2))]
    text += [f"\n![{path.stem}]({path.name})" for path in pictures if path is not None]
    return {"markdown": "\n".join(text) + "\n", "levels": {row.name: _levels(row) for row in rows}}


def _levels(row: Row) -> list[float]:
    return numbers((row.run.headline or {}).get("levels"))


def _stacked(figure: Any, rows: list[Row]) -> None:
    axis = figure.add_subplot()
    for place, row in enumerate(rows):
        left, levels = 0.0, _levels(row)
        colours = ramp(len(levels), False)
        for level, value in enumerate(levels):
            axis.barh([-place], [value], left=[left], color="#{:02x}{:02x}{:02x}".format(*colours[level]), edgecolor=FILE.paper,
                      linewidth=0.6)
            left += value
    axis.set_yticks([-place for place in range(len(rows))], [row.name for row in rows])
    finish(axis, "nats per token, leaf level at the left, root level at the right end")


def _raw(figure: Any, rows: list[Row]) -> None:
    axis = figure.add_subplot()
    for place, row in enumerate(rows):
        axis.plot(range(len(_levels(row))), _levels(row), label=row.name, markersize=4, linewidth=1.4, **style(place))
    axis.set_title("nats per token of each level", loc="left", color=FILE.muted, fontsize=10)
    finish(axis, "level (0: leaves)")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)


def weight_curves(found: Collection) -> dict[str, Any]:
    """The weights themselves, for a tree of 16 levels; their mean is 1."""
    curves = {kind if kind == "none" else f"{kind} {gamma:g}": level_weights(kind, gamma, HEIGHT).tolist()
              for kind, gamma in WEIGHTS}

    def fill(figure: Any) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for place, (name, weights) in enumerate(curves.items()):
            for axis, kind in zip(axes, ("exponential", "linear")):
                if name.split()[0] in (kind, "none"):
                    axis.plot(range(HEIGHT), weights, label=name, markersize=3.5, **style(place))
        for axis, kind in zip(axes, ("exponential", "linear")):
            axis.set_title(f"training weight, {kind}", loc="left", color=FILE.muted, fontsize=10)
            axis.legend(frameon=False, fontsize=8)
            finish(axis, "level (0: leaves)")

    path = draw(found.file(".svg"), fill, (9.0, 3.6))
    columns = [("level", [str(level) for level in range(HEIGHT)])]
    columns += [(name, [f"{weight:.4f}" for weight in weights]) for name, weights in curves.items()]
    picture = f"\n![weights]({path.name})\n" if path is not None else ""
    return {"markdown": f"## Training weights by level, H = {HEIGHT}, mean 1\n\n{grid(columns)}{picture}", "weights": curves}
