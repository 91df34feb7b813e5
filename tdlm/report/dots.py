"""The comparison as one figure: a panel for every group that was measured alike, and one for generated text.

In a group's panel each run is a point with its error (two Monte-Carlo standard errors to each side), best at the top, and
the n-gram models are dashed lines. Panels have axes of their own, since their numbers cannot be compared. The last panel,
where runs were judged by one model, sets generative perplexity against entropy: better is lower *at the same entropy*.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .colour import SERIES
from .figures import DASHES, GRID, INK, MUTED, PAPER, page_svg, rendered, series
from .ranking import Entry, Section

ERRORS = 2
MARKERS = "oDs^vPX*"


@dataclass(frozen=True)
class Palette:
    ink: str
    muted: str
    grid: str
    paper: str
    series: Sequence[str]


PAGE = Palette(INK, MUTED, GRID, PAPER, [series(place) for place in range(len(SERIES))])
FILE = Palette("#1b1d22", "#63666e", "#e4e0d7", "#ffffff", [light for light, _ in SERIES])


def page_figure(sections: Sequence[Section], prefix: str) -> str:
    """Wide and narrow, in the page's colours."""
    shapes = (("wide", 8.6, False), ("narrow", 4.1, True))
    return "".join(page_svg(lambda figure, small=small: _fill(figure, sections, PAGE, small), (width, _height(sections)),
                            f"{prefix}-{css}", "The bounds of the runs", css) for css, width, small in shapes)


def figure_file(sections: Sequence[Section], form: str) -> bytes:
    """The figure as an SVG or PNG file, on white."""

    def fill(figure: Any) -> None:
        figure.set_facecolor(FILE.paper)
        _fill(figure, sections, FILE, False)

    return rendered(fill, (8.6, _height(sections)), "compare", form=form, text="path")


def drawable(sections: Sequence[Section]) -> list[tuple[int, Section, list[Entry]]]:
    """Group number, group and its runs that have a bound."""
    found = [(place, section, [entry for entry in section.entries if entry["bound"] is not None])
             for place, section in enumerate(sections)]
    return [item for item in found if item[2]]


def judged(sections: Sequence[Section]) -> list[Entry]:
    """Runs whose text was judged, when all of them by the same model."""
    found = [entry for section in sections for entry in section.entries
             if entry["generative_perplexity"] is not None and entry["entropy"] is not None]
    return found if len({entry["judge"] for entry in found}) == 1 else []


def _height(sections: Sequence[Section]) -> float:
    return sum(0.95 + 0.34 * len(entries) for _, _, entries in drawable(sections)) + (3.1 if judged(sections) else 0)


def _fill(figure: Any, sections: Sequence[Section], palette: Palette, narrow: bool) -> None:
    panels, texts = drawable(sections), judged(sections)
    heights = [0.95 + 0.34 * len(entries) for _, _, entries in panels] + ([3.1] if texts else [])
    axes = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    for (place, section, entries), axis in zip(panels, axes):
        _bounds(axis, section, entries, palette, f"group {place + 1}: " if len(sections) > 1 else "", narrow)
    if texts:
        human = next((section.human for section in sections if section.human), None)
        _texts(axes[-1], texts, human, palette, narrow)


def _bounds(axis: Any, section: Section, entries: list[Entry], palette: Palette, group: str, narrow: bool) -> None:
    for row, entry in enumerate(entries):
        axis.errorbar([entry["bound"]], [-row], xerr=[ERRORS * (entry["error"] or 0.0)], **_point(entry, palette))
    values = [entry["bound"] + side * ERRORS * (entry["error"] or 0.0) for entry in entries for side in (-1, 1)]
    values += [model["bound"] for model in section.references]
    room = 0.07 * (max(values) - min(values)) or 0.1
    axis.set_xlim(min(values) - room, max(values) + room)
    axis.set_ylim(-len(entries) + 0.4, 0.6)
    lines = sorted(section.references, key=lambda model: model["bound"])
    for model, right in zip(lines, [*lines[1:], None]):
        axis.axvline(model["bound"], color=palette.muted, linewidth=1.2, linestyle=DASHES.get(model["name"], "-"), zorder=1)
        crowded = right is not None and right["bound"] - model["bound"] < 2 * room  # its name leans away from the next one
        axis.annotate(model["name"], (model["bound"], 1), xycoords=("data", "axes fraction"), xytext=(0, 3),
                      rotation=-25 if crowded else 25, textcoords="offset points", ha="right" if crowded else "left",
                      va="bottom", color=palette.muted, fontsize=8)
    axis.set_yticks([-row for row in range(len(entries))], [_name(entry, narrow) for entry in entries])
    axis.set_xlabel(f"{group}bound, nats per token (lower is better)", loc="right", color=palette.muted)
    _finish(axis, palette, "x")


def _texts(axis: Any, entries: list[Entry], human: dict[str, Any] | None, palette: Palette, narrow: bool) -> None:
    points = [(entry["entropy"], entry["generative_perplexity"], _short(entry.name, narrow)) for entry in entries]
    for entry, (x, y, _) in zip(entries, points):
        axis.errorbar([x], [y], **_point(entry, palette))
    if human and human["entropy"] is not None and human["generative_perplexity"] is not None:
        points.append((human["entropy"], human["generative_perplexity"], "human text"))
        axis.plot(*points[-1][:2], "*", color=palette.ink, markersize=10, markeredgecolor=palette.paper, zorder=4)
    axis.margins(0.3 if narrow else 0.2, 0.12)
    wide, high = (end - start for start, end in (axis.get_xlim(), axis.get_ylim()))
    for x, y, name in points:
        left = any(0 < other - x < 0.3 * wide and abs(level - y) < 0.08 * high for other, level, _ in points)
        axis.annotate(name, (x, y), xytext=(-7 if left else 7, 0), textcoords="offset points", va="center", fontsize=9,
                      ha="right" if left else "left", color=palette.ink)  # away from a point that is near
    axis.set_xlabel("entropy of the generated text, nats", loc="right", color=palette.muted)
    axis.set_title("generative perplexity" + ("" if narrow else f", judged by {entries[0]['judge']}"), loc="left",
                   color=palette.muted, fontsize=10, pad=16)
    _finish(axis, palette, "both")


def _point(entry: Entry, palette: Palette) -> dict[str, Any]:
    """Colour and shape of a run; shapes change when the colours begin again."""
    shape = MARKERS[entry.place // len(SERIES) % len(MARKERS)]
    return {"fmt": shape, "color": palette.series[entry.place % len(SERIES)], "markersize": 6.5, "markeredgecolor": palette.paper,
            "markeredgewidth": 0.8, "elinewidth": 1.4, "capsize": 3, "zorder": 4}


def _name(entry: Entry, narrow: bool) -> str:
    name = _short(entry.name, narrow)
    return f"{name}  (no bound)" if entry["kind"] == "not a bound" else name


def _short(name: str, narrow: bool) -> str:
    return name if not narrow or len(name) <= 14 else f"{name[:13]}\N{HORIZONTAL ELLIPSIS}"


def _finish(axis: Any, palette: Palette, grid: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_facecolor("none")
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.grid(axis=grid, color=palette.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(palette.grid)
    axis.tick_params(colors=palette.muted, length=0)
    for text in axis.get_yticklabels():
        text.set_color(palette.ink if grid == "x" else palette.muted)
