"""Which runs may stand in one table: those whose numbers were measured alike. Others get a table of their own.

A bound is a property of the model *and* of what was measured: the text, how it was cut into rows, what was done about
PAD, how rows were averaged. Runs that differ there are never put into one column; the page says in what they differ.

The estimator is not part of this. `sampled`, `count` and `exact` have the same expectation, so they may stand side by side,
each with its error: otherwise masked diffusion, trees and left-to-right models could never be compared.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .read import Run, mapping, number
from .text import whole, words

UNKNOWN = "not recorded"
PAD_MODES = {"pack": "no PAD, bounds -log p(x)", "count": "PAD terms counted, real tokens divided by, bounds -log p(x)",
             "given-length": "PAD always visible, bounds -log p(x | length)", "drop": "PAD terms left out, not a bound"}
WHY = {
    "evaluated": "validation during training scores fewer rows, with fewer repeats",
    "PAD mode": "it decides what the number bounds, or whether it is a bound at all",
    "row length": "in a longer row a token has more context",
    "row layout": "rows of one document each, or of the joined stream, give tokens different contexts",
    "average": "a mean over batches is not the mean over tokens",
    "text": "it is other text, or another part of it",
    "data": "it is another text",
    "tokenizer": "a nat per token means something else when the tokens are others; only bits per byte of the same text remain",
    "tokens scored": "it is more or less of the text",
}


@dataclass(frozen=True)
class Group:
    """Runs with one protocol."""

    protocol: dict[str, str]
    runs: list[Run]


def protocol(run: Run) -> dict[str, str]:
    """What two numbers must agree in to be comparable."""
    found = run.eval or {}
    asked = mapping(found.get("protocol"))
    origin = {**run.provenance, **mapping(found.get("provenance"))}

    def first(*values: Any) -> str:
        return next((words(value) for value in values if value is not None), UNKNOWN)

    average = first(asked.get("average"), "tokens")
    scored = found.get("tokens")
    return {
        "evaluated": "with tdlm eval" if run.eval else "no: validation during training only",
        "PAD mode": first(found.get("pad")),
        "row length": first(asked.get("length"), found.get("length"), run.setting("data", "length")),
        "row layout": first(asked.get("layout"), found.get("layout"), run.setting("data", "layout")),
        "average": f"{average} of {words(asked.get('batch'))} rows" if average == "batches" else f"over {average}",
        "text": first(mapping(found.get("set")).get("name"), found.get("split"), "valid"),
        "data": first(origin.get("data_fingerprint")),
        "tokenizer": first(origin.get("tokenizer_hash")),
        "tokens scored": UNKNOWN if number(scored) is None else whole(scored),
    }


def groups(runs: list[Run]) -> list[Group]:
    """Runs with equal protocols together, in the order in which they came."""
    found: dict[tuple[tuple[str, str], ...], Group] = {}
    for run in runs:
        asked = protocol(run)
        found.setdefault(tuple(asked.items()), Group(asked, [])).runs.append(run)
    return list(found.values())


def differing(protocols: list[dict[str, str]]) -> list[str]:
    """The points in which protocols differ."""
    return [name for name in protocols[0] if len({each[name] for each in protocols}) > 1] if protocols else []


def in_words(protocols: list[dict[str, str]]) -> list[str]:
    """One sentence for every point in which protocols differ, and why it matters. What a run that was not evaluated does not
    record is no difference of its own."""
    lines = []
    unequal = "evaluated" in differing(protocols)
    for name in differing(protocols):
        places: dict[str, list[int]] = {}
        for place, each in enumerate(protocols):
            if each[name] != UNKNOWN or not unequal:
                places.setdefault(each[name], []).append(place + 1)
        if len(places) < 2:
            continue
        values = "; ".join(f"{_groups(found)}: {value}{_meaning(name, value)}" for value, found in places.items())
        lines.append(f"{name} ({values}): {WHY[name]}.")
    return lines


def _groups(places: list[int]) -> str:
    listed = ", ".join(map(str, places[:-1]))
    return f"groups {listed} and {places[-1]}" if listed else f"group {places[0]}"


def _meaning(name: str, value: str) -> str:
    meaning = PAD_MODES.get(value) if name == "PAD mode" else None
    return f", {meaning}" if meaning else ""
