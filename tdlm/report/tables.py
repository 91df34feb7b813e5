"""The comparison as a table: the same cells for HTML, Markdown and, unrounded, CSV."""
from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from .protocol import UNKNOWN, in_words
from .ranking import Entry, Section
from .text import DASH, esc, fixed, plus_minus, short, size, words

SIGNS = {"bound": "\N{LESS-THAN OR EQUAL TO}", "exact": "=", "not a bound": "no bound:"}
NARROW = "\N{NARROW NO-BREAK SPACE}"
NEAR = "\N{ALMOST EQUAL TO}"
Facts = dict[str, Any]


def _bound(facts: Facts) -> str:
    return DASH if facts["bound"] is None else f"{_sign(facts)}{plus_minus(facts['bound'], facts['error'])}"


def _sign(facts: Facts) -> str:
    return SIGNS[facts["kind"]] + NARROW


def _signed(key: str, digits: int) -> Callable[[Facts], str]:
    def text(facts: Facts) -> str:
        sign = "" if facts["kind"] == "not a bound" or facts[key] is None else _sign(facts)
        return sign + fixed(facts[key], digits)

    return text


def _levels(facts: Facts) -> str:
    values = facts["levels"]
    if len(values) < 2:
        return DASH
    if len(values) > 6:
        values = [*values[:3], None, *values[-2:]]
    return " + ".join("\N{HORIZONTAL ELLIPSIS}" if value is None else fixed(value, 2) for value in values)


def _parameters(facts: Facts) -> str:
    parts = [short(facts[key]) for key in ("parameters_blocks", "parameters_head")]
    return DASH if facts["parameters"] is None else f"{short(facts['parameters'])} ({', '.join(parts)})"


COLUMNS: tuple[tuple[str, Callable[[Facts], str]], ...] = (
    ("bound, nats/token", _bound),
    ("perplexity", _signed("perplexity", 2)),
    ("bits/byte", _signed("bits_per_byte", 3)),
    ("estimator", lambda facts: DASH if facts["estimator"] is None else words(facts["estimator"])),
    ("levels, leaf first", _levels),
    ("gen. perplexity", lambda facts: fixed(facts["generative_perplexity"], 1)),
    ("entropy, nats", lambda facts: fixed(facts["entropy"], 2)),
    ("distinct-2", lambda facts: fixed(facts["distinct_2"], 3)),
    ("MAUVE", lambda facts: fixed(facts["mauve"], 3)),
    ("evaluations", lambda facts: fixed(facts["evaluations"], 0)),
    ("judge", lambda facts: DASH if facts["judge"] is None else words(facts["judge"])),
    ("parameters (blocks, head)", _parameters),
    ("tokens seen", lambda facts: short(facts["tokens_seen"])),
    ("tokens/s", lambda facts: short(facts["tokens_per_second"])),
    ("memory", lambda facts: size(facts["memory"])),
    ("device", lambda facts: DASH if facts["device"] is None else words(facts["device"])),
)
REFERENCES = {"bound, nats/token": ("bound", 3), "perplexity": ("perplexity", 2), "bits/byte": ("bits_per_byte", 3),
              "gen. perplexity": ("generative_perplexity", 1), "entropy, nats": ("entropy", 2), "distinct-2": ("distinct_2", 3)}


def about(entry: Entry) -> str:
    """What a run is, in a line: method, process, head, tree, backbone, and what it began with."""
    parts = [entry["method"], entry["process"], entry["head"] and f"{entry['head']} head", entry["tree"], entry["backbone"]]
    if entry["starts_from"]:
        parts.append(f"begun with {entry['starts_from']}")
    if entry["imported_from"]:
        parts.append(f"imported from {entry['imported_from']}")
    return " \N{MIDDLE DOT} ".join(str(part) for part in parts if part)


SHARED = {"estimator": "bound", "judge": "generative_perplexity", "device": "method"}
"""Columns that become a line above the tables where all runs agree on them, and what they are about: a run without a generative
perplexity has no judge, but one without an estimator beside its bound was not measured like those that have one."""


def shown(sections: Sequence[Section]) -> list[tuple[str, Callable[[Facts], str]]]:
    """The columns in which runs have something to say that is not the same for all of them."""
    return [(name, text) for name, text in COLUMNS
            if (said := _values(sections, name, text)) - {DASH} and (len(said) > 1 or name not in SHARED)]


def shared(sections: Sequence[Section]) -> str:
    """What is the same for all runs that it is about."""
    found = [(name, _values(sections, name, text)) for name, text in COLUMNS if name in SHARED]
    return " \N{MIDDLE DOT} ".join(f"{name}: {next(iter(said))}" for name, said in found if len(said) == 1 and said != {DASH})


def _values(sections: Sequence[Section], name: str, text: Callable[[Facts], str]) -> set[str]:
    """What the runs say in a column; a dash where one that should say it does not."""
    return {text(entry.facts) for section in sections for entry in section.entries
            if entry.facts.get(SHARED.get(name, name), "") is not None}


def alike(section: Section) -> str:
    """The protocol of a group on one line."""
    return " \N{MIDDLE DOT} ".join(f"{name}: {value}" for name, value in section.protocol.items() if value != UNKNOWN)


def _references(section: Section, columns: list[tuple[str, Any]]) -> list[tuple[str, list[str]]]:
    """The rows of the n-gram models and of human text."""
    named = [(f"{model['name']} (counting)", model) for model in section.references]
    named += [("human text", section.human)] if section.human else []

    def cell(column: str, facts: Facts) -> str:
        key, digits = REFERENCES.get(column, ("", 0))
        return fixed(facts[key], digits) if facts.get(key) is not None else ""

    return [(name, [cell(column, facts) for column, _ in columns]) for name, facts in named]


def html_table(section: Section, columns: list[tuple[str, Callable[[Facts], str]]], link: Callable[[Entry], str]) -> str:
    """One row a run; on a narrow screen every row becomes a card whose cells carry their column's name."""
    head = "".join(f"<th>{esc(name)}</th>" for name in ("run", *(name for name, _ in columns)))
    rows = []
    for entry in section.entries:
        cells = [f'<td data-name="{esc(name)}"><span>{_emphasised(entry, number, esc(text(entry.facts)))}</span></td>'
                 for number, (name, text) in enumerate(columns)]
        target, name = link(entry), f'<i class="dot s{entry.place % 8}"></i>{esc(entry.name)}'
        name = f'<a href="#{target}">{name}</a>' if target else name
        rows.append(f'<tr class="{entry["mark"]}"><th>{name}<small>{esc(about(entry))}</small></th>{"".join(cells)}</tr>')
    for name, texts in _references(section, columns):
        cells = "".join(f'<td data-name="{esc(column)}">{esc(text)}</td>' for (column, _), text in zip(columns, texts))
        rows.append(f'<tr class="reference"><th>{esc(name)}</th>{cells}</tr>')
    notes = "".join(f"<li>{esc(note)}</li>" for note in section.notes)
    return (f'<div class="scroll"><table class="numbers cards"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
            f'</table></div>{f"<ul class=notes>{notes}</ul>" if notes else ""}')


def _emphasised(entry: Entry, column: int, cell: str) -> str:
    if column:
        return cell
    if entry["mark"] == "best":
        return f'<span class="badge">best</span> <b>{cell}</b>'
    return f'<span class="badge near">{NEAR} best</span> {cell}' if entry["mark"] == "near" else cell


def markdown(sections: Sequence[Section]) -> str:
    """The same tables as Markdown, to be committed beside the numbers they come from."""
    columns, lines = shown(sections), []
    if len(sections) > 1:
        lines += ["These runs were not measured alike, so they stand in separate tables; numbers of different groups cannot be "
                  "compared. They differ in:", ""]
        lines += [f"* {_md(line)}" for line in in_words([section.protocol for section in sections])] + [""]
    if everywhere := shared(sections):
        lines += [f"The same throughout: {_md(everywhere)}.", ""]
    for place, section in enumerate(sections):
        lines += [f"## Group {place + 1}", ""] if len(sections) > 1 else []
        lines += [f"Measured alike: {_md(alike(section))}.", ""]
        lines.append("| " + " | ".join(["run", "what it is", *(name for name, _ in columns)]) + " |")
        lines.append("|" + "---|" * 2 + "---:|" * len(columns))
        for entry in section.entries:
            cells = [_md(text(entry.facts)) for _, text in columns]
            if entry["mark"]:
                cells[0] = f"**{cells[0]}** (best)" if entry["mark"] == "best" else f"{cells[0]} ({NEAR} best)"
            lines.append("| " + " | ".join([_md(entry.name), _md(about(entry)), *cells]) + " |")
        for name, cells in _references(section, columns):
            lines.append("| " + " | ".join([f"*{_md(name)}*", "", *map(_md, cells)]) + " |")
        lines += ["", *[f"* {_md(note)}" for note in section.notes], ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _md(text: str) -> str:
    for mark in "\\|*_`<[":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def as_json(sections: Sequence[Section]) -> list[dict[str, Any]]:
    return [{"protocol": section.protocol, "runs": [{"name": entry.name, **entry.facts} for entry in section.entries],
             "references": section.references, "human": section.human, "notes": section.notes} for section in sections]


def as_csv(sections: Sequence[Section]) -> str:
    """One line a run, unrounded; the protocol's points are columns too, so that lines can be sorted without losing them."""
    held = io.StringIO()
    names = list(dict.fromkeys(name for section in sections for entry in section.entries for name in entry.facts))
    points = list(sections[0].protocol)
    writer = csv.writer(held, lineterminator="\n")
    writer.writerow(["group", "run", *names, *points])
    for place, section in enumerate(sections):
        for entry in section.entries:
            cells = [json.dumps(value) if isinstance(value, list) else value for value in map(entry.facts.get, names)]
            writer.writerow([place + 1, entry.name, *cells, *section.protocol.values()])
        others = [(f"{model['name']} (counting)", model) for model in section.references]
        for name, facts in [*others, *([("human text", section.human)] if section.human else [])]:
            writer.writerow([place + 1, name, *map(facts.get, names), *section.protocol.values()])
    return held.getvalue()
