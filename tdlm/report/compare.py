"""Several runs on one page: a table and overlaid curves for every group that was measured alike, and one figure of all."""
from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np

from ..config import difference
from .bars import Bar, bars
from .dots import drawable, judged, page_figure
from .figures import Chart, Line, line_chart, series
from .protocol import in_words
from .ranking import Entry, Section, rank
from .read import Run, number
from .tables import alike, html_table, shared, shown
from .text import esc


def comparison(runs: list[Run], prefix: str, link: Callable[[Entry], str]) -> str:
    """The section of a page; `link` gives the anchor of a run's own part, or nothing."""
    sections = rank(runs)
    note = _note(sections) if len(sections) > 1 else ""
    parts = [_group(section, place, sections, runs, f"{prefix}{place}", link) for place, section in enumerate(sections)]
    everywhere = f'<p class="settings">The same throughout: {esc(shared(sections))}</p>' if shared(sections) else ""
    return (f'<section id="comparison"><h2>Comparison</h2>{note}{_overview(sections, prefix)}{everywhere}{"".join(parts)}'
            f"{_settings(runs)}</section>")


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _note(sections: list[Section]) -> str:
    lines = "".join(f"<li>{esc(line)}</li>" for line in in_words([section.protocol for section in sections]))
    return (f'<div class="warning" role="note"><p><b>These runs were not measured alike</b>, so they stand in '
            f"{len(sections)} separate tables. Numbers of different groups cannot be compared. They differ in:</p>"
            f"<ul>{lines}</ul></div>")


def _overview(sections: list[Section], prefix: str) -> str:
    """The figure of all runs; plain bars where matplotlib is missing."""
    if not drawable(sections):
        return ""
    if can_draw():
        text = " Generated text is better where its perplexity is lower at the same entropy." if judged(sections) else ""
        return (f'<figure class="plot">{page_figure(sections, f"{prefix}-dots")}<figcaption>Points with two Monte-Carlo standard '
                f"errors to each side; dashed: models that only count, on the same tokens.{text}</figcaption></figure>")
    several, charts = len(sections) > 1, ""
    for place, section, entries in drawable(sections):
        rows = [Bar(entry.name, entry["bound"], entry["error"] or 0.0, f"s{entry.place % 8} own") for entry in entries]
        rows += [Bar(f"{model['name']} (counting)", model["bound"], css="plain") for model in section.references]
        charts += bars(rows, caption=f"{f'Group {place + 1}: n' if several else 'N'}ats per token; shorter is better")
    return charts


def _group(section: Section, place: int, sections: list[Section], runs: list[Run], prefix: str,
           link: Callable[[Entry], str]) -> str:
    title = f"<h3>Group {place + 1}</h3>" if len(sections) > 1 else ""
    chart = _curves(section, runs)
    figure = ""
    if any(line.valid is not None and len(line.valid[0]) > 1 for line in chart.lines) and can_draw():  # one point is no curve
        figure = (f'<figure class="plot">{_key(section)}{line_chart(chart, prefix)}<figcaption>Validation bound during training; '
                  "error bars are one standard error.</figcaption></figure>")
    return f'{title}<p class="settings">{esc(alike(section))}</p>{html_table(section, shown(sections), link)}{figure}'


def _key(section: Section) -> str:
    return '<p class="legend">' + "".join(f'<span><i class="dot s{entry.place % 8}"></i>{esc(entry.name)}</span>'
                                          for entry in section.entries) + "</p>"


def _curves(section: Section, runs: list[Run]) -> Chart:
    lines = []
    for entry in section.entries:
        points = [(point["step"], value, number(point.get("error")) or 0.0) for point in runs[entry.place].valid
                  if (value := number(point.get("bound"))) is not None]
        if points:
            steps, values, errors = np.array(points, dtype=np.float64).T
            lines.append(Line(entry.name, series(entry.place), valid=(steps, values, errors)))
    levels = {model["name"]: model["bound"] for model in section.references}
    return Chart("compare", "Validation bound of the runs", "nats per token", lines, levels=levels)


def _settings(runs: list[Run]) -> str:
    """In what the configurations differ from the first run's."""
    first, items = runs[0], []
    for run in runs[1:]:
        lines = [line for line in difference(first.config, run.config) if not line.startswith("name:")]
        shown_lines = "".join(f"<li><code>{esc(line)}</code></li>" for line in lines) or "<li>nothing</li>"
        items.append(f"<p>From <b>{esc(first.name)}</b> to <b>{esc(run.name)}</b>:</p><ul>{shown_lines}</ul>")
    return f'<details><summary>What the settings differ in</summary>{"".join(items)}</details>' if items else ""
