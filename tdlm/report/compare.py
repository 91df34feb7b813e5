"""Which runs may stand in one table: those whose numbers were measured alike. Others get a table of their own.

A bound is a property of the model *and* of what was measured: the text, how it was cut into rows, what was done about
PAD, which estimator. Runs that differ there are never put into one column; the page says in which point they differ.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config import difference
from .figures import Chart, Line, line_chart, series
from .read import NGRAMS, Run, mapping, number
from .text import anchor, esc, fixed, plus_minus, short, whole, words

UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Group:
    """Runs with one protocol."""

    protocol: dict[str, str]
    runs: list[Run]


def protocol(run: Run) -> dict[str, str]:
    """What two numbers must agree in to be comparable."""
    found = run.eval or {}
    origin = {**run.provenance, **mapping(found.get("provenance"))}
    length, layout = run.setting("data", "length"), run.setting("data", "layout")
    scored = found.get("tokens")
    return {
        "evaluated": "with tdlm eval" if run.eval else "no: validation during training only",
        "PAD mode": words(found["pad"]) if "pad" in found else UNKNOWN,
        "estimator": words(found["estimator"]) if "estimator" in found else UNKNOWN,
        "row length": UNKNOWN if length is None else words(length),
        "row layout": UNKNOWN if layout is None else words(layout),
        "data": words(origin.get("data_fingerprint") or UNKNOWN),
        "tokenizer": words(origin.get("tokenizer_hash") or UNKNOWN),
        "tokens scored": UNKNOWN if number(scored) is None else whole(scored),
    }


def groups(runs: list[Run]) -> list[Group]:
    """Runs with equal protocols together, in the order in which they came."""
    found: dict[tuple[tuple[str, str], ...], Group] = {}
    for run in runs:
        asked = protocol(run)
        found.setdefault(tuple(asked.items()), Group(asked, [])).runs.append(run)
    return list(found.values())


def comparison(runs: list[Run], prefix: str) -> str:
    """Tables and overlaid curves, one set per protocol, and what the protocols differ in."""
    found = groups(runs)
    note = _note(found) if len(found) > 1 else ""
    parts = [_group(group, place, len(found) > 1, f"{prefix}{place}", [runs.index(run) for run in group.runs])
             for place, group in enumerate(found)]
    return f'<section id="comparison"><h2>Comparison</h2>{note}{"".join(parts)}{_settings(runs)}</section>'


def _note(found: list[Group]) -> str:
    names = [name for name in found[0].protocol if len({group.protocol[name] for group in found}) > 1]
    head = "".join(f"<th>Group {place + 1}</th>" for place in range(len(found)))
    rows = "".join(f"<tr><th>{esc(name)}</th>{''.join(f'<td>{esc(group.protocol[name])}</td>' for group in found)}</tr>"
                   for name in names)
    return (f'<div class="warning" role="note"><p><b>These runs were not measured alike</b>, so they stand in '
            f'{len(found)} separate tables. Numbers of different groups cannot be compared. They differ in:</p>'
            f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
            "</div>")


def _group(group: Group, place: int, several: bool, prefix: str, colours: list[int]) -> str:
    title = f"<h3>Group {place + 1}</h3>" if several else ""
    known = [f"{esc(name)}: {esc(value)}" for name, value in group.protocol.items() if value != UNKNOWN]
    ngrams = [name for name in NGRAMS if any(name in run.ngrams for run in group.runs)]
    head = "".join(f"<th>{name}</th>" for name in ["run", "step", "bound (nats/token)", "perplexity", "bits/byte",
                                                   *ngrams, "parameters", "tokens/s"])
    bounds = [number((run.headline or {}).get("bound")) for run in group.runs]
    best = min((value for value in bounds if value is not None), default=None)
    rows = "".join(_row(run, ngrams, best, colour) for run, colour in zip(group.runs, colours))
    chart = _curves(group.runs, colours)
    drawn = line_chart(chart, prefix) if chart.lines else ""
    figure = (f'<figure class="plot">{_key(group.runs, colours)}{drawn}<figcaption>Validation bound during training; '
              f'error bars are one standard error.</figcaption></figure>' if drawn else "")
    alike = f'<p class="settings">{" &middot; ".join(known)}</p>'
    return (f'{title}{alike}<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead>'
            f'<tbody>{rows}</tbody></table></div>{figure}')


def _row(run: Run, ngrams: list[str], best: float | None, colour: int) -> str:
    head = run.headline or {}
    bound = plus_minus(head.get("bound"), head.get("error"))
    if number(head.get("bound")) is not None and number(head.get("bound")) == best:
        bound = f"<b>{bound}</b>"
    speed = [value for point in run.train if (value := number(point.get("tokens_per_second"))) is not None]
    total = mapping(run.provenance.get("parameters")).get("total")
    cells = [whole(head.get("step")), bound, fixed(head.get("perplexity"), 2), fixed(head.get("bits_per_byte")),
             *[fixed(run.ngrams.get(name)) for name in ngrams],
             short(total), short(np.median(speed).item() if speed else None)]
    name = f'<i class="dot s{colour % 8}"></i><a href="#{anchor("run", run.name, colour)}">{esc(run.name)}</a>'
    return f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _key(runs: list[Run], colours: list[int]) -> str:
    return '<p class="legend">' + "".join(f'<span><i class="dot s{colour % 8}"></i>{esc(run.name)}</span>'
                                          for run, colour in zip(runs, colours)) + "</p>"


def _curves(runs: list[Run], colours: list[int]) -> Chart:
    lines = []
    for run, colour in zip(runs, colours):
        points = [(point["step"], value, number(point.get("error")) or 0.0) for point in run.valid
                  if (value := number(point.get("bound"))) is not None]
        if points:
            steps, values, errors = np.array(points, dtype=np.float64).T
            lines.append(Line(run.name, series(colour), valid=(steps, values, errors)))
    return Chart("compare", "Validation bound of the runs", "nats per token", lines, levels=_common(runs))


def _common(runs: list[Run]) -> dict[str, float]:
    """The n-gram levels, where all runs agree on them."""
    found = [run.ngrams for run in runs if run.ngrams]
    return {name: value for name, value in (found[0] if found else {}).items()
            if all(abs(other.get(name, value) - value) < 1e-6 for other in found)}


def _settings(runs: list[Run]) -> str:
    """In what the configurations differ from the first run's."""
    first, items = runs[0], []
    for run in runs[1:]:
        lines = [line for line in difference(first.config, run.config) if not line.startswith("name:")]
        shown = "".join(f"<li><code>{esc(line)}</code></li>" for line in lines) or "<li>nothing</li>"
        items.append(f"<p>From <b>{esc(first.name)}</b> to <b>{esc(run.name)}</b>:</p><ul>{shown}</ul>")
    return f'<details><summary>What the settings differ in</summary>{"".join(items)}</details>'
