"""What the finished runs of a study say: one row a run, with what it cost beside what it reached.

The comparison (`compare.*`) sorts runs by their bound; the study's own table keeps the study's order and its own columns. Beside
every bound it sets how long, on how many tokens and with how much memory the run was trained, how often it saw the corpus, and
what the training rows themselves cost at the end (the mean over the last tenth of training, with its standard error): where
that lies below the validation bound by more than both errors, the run has begun to learn its corpus by heart.
"""
from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.batches import TrainRows
from ..data.store import TokenStore
from ..errors import DataError
from ..report.read import Run, number, read_run
from ..report.text import fixed, plus_minus, short, size
from .entry import Entry, Size, Study, Wishes

OFTEN = 4.0
"""Epochs from which on a corpus is no longer new."""


@dataclass(frozen=True)
class Row:
    """A finished run and the entry it was made for (one of its own for runs that the user brings)."""

    entry: Entry
    run: Run
    spent: float = 0.0
    """Minutes that the trials of its learning rate took."""

    @property
    def name(self) -> str:
        return self.entry.name


@dataclass(frozen=True)
class Collection:
    """All that a study's outcome is made of."""

    study: Study
    size: Size
    out: Path
    rows: list[Row]
    wishes: Wishes
    device: str
    say: Callable[[str], None]

    def file(self, what: str) -> Path:
        return self.out / f"{self.study.name}{what}"


def row_of(entry: Entry, folder: Path, spent: float = 0.0) -> Row:
    return Row(entry, read_run(folder), spent)


def cost(row: Row) -> dict[str, Any]:
    """What a run cost and what it reached on the rows it was trained on; None where its folder does not say."""
    run, config = row.run, row.entry.config
    last = run.train[-1] if run.train else {}
    seconds, steps = training_seconds(run.train), number(last.get("step"))
    minutes = seconds[-1][1] / 60 if seconds else None
    items = rows_of_an_epoch(run, row.entry)
    epochs = steps * config.train.batch / items if steps and items else None
    late = _values([line for line in run.train if steps and line["step"] > 0.9 * steps], "bound")
    memory = _values(run.train, "memory")
    speeds = _values(run.train[1:] or run.train, "tokens_per_second")
    head = run.headline or {}
    return {
        "steps": None if steps is None else int(steps), "minutes": minutes, "tokens": number(last.get("tokens")),
        "tokens_per_second": statistics.median(speeds) if speeds else None, "memory": max(memory, default=None),
        "epochs": epochs, "often_from_minute": minutes * OFTEN / epochs if minutes and epochs and epochs > OFTEN else None,
        "train_bound": statistics.fmean(late) if late else None,
        "train_error": statistics.stdev(late) / math.sqrt(len(late)) if len(late) > 1 else None,
        "bound": number(head.get("bound")), "error": number(head.get("error")), "perplexity": number(head.get("perplexity")),
        "exact": head.get("estimator") == "exact", "levels": head.get("levels"),
        "lr": config.train.lr, "tuning_minutes": row.spent,
        "parameters": number((run.provenance.get("parameters") or {}).get("total")), "tree": run.tree_shape,
    }


def training_seconds(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(step, seconds of training until then). The first step, which compiles, is left out."""
    times = [(float(line["step"]), value) for line in lines if (value := number(line.get("seconds"))) is not None]
    first = times[0][1] if times and times[0][0] == 1 and len(times) > 1 else 0.0
    return [(step, value - first) for step, value in times]


def _values(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [value for line in lines if (value := number(line.get(key))) is not None]


def rows_of_an_epoch(run: Run, entry: Entry) -> int | None:
    """Rows until the training text begins again; None where the data no longer lies where it was."""
    recorded = run.provenance.get("data")
    if not recorded:
        return None
    data = entry.config.data
    try:
        store = TokenStore(os.path.normpath(Path(run.folder) / str(recorded)))
        return TrainRows(store, length=data.length, layout=data.layout, batch=entry.config.train.batch, seed=0).items
    except DataError:
        return None


def table(rows: list[Row]) -> str:
    """The study's table as Markdown: its own columns, then what every study shows."""
    costs = [cost(row) for row in rows]
    own = list(dict.fromkeys(name for row in rows for name in row.entry.facts))
    columns: list[tuple[str, list[str]]] = [("run", [row.name for row in rows])]
    columns += [(name, [_word(row.entry.facts.get(name)) for row in rows]) for name in own]
    columns += [
        ("tree", [found["tree"] or "-" for found in costs]),
        ("bound, nats/token", [("=" if found["exact"] else "≤") + plus_minus(found["bound"], found["error"]) for found in costs]),
        ("perplexity", [fixed(found["perplexity"], 2) for found in costs]),
        ("train bound at the end", [plus_minus(found["train_bound"], found["train_error"]) for found in costs]),
        ("minutes", [fixed(found["minutes"], 2) for found in costs]),
        ("tuning, minutes", [fixed(found["tuning_minutes"], 2) if found["tuning_minutes"] else "" for found in costs]),
        ("rate", [_rate(row) for row in rows]),
        ("steps", [short(found["steps"]) for found in costs]), ("tokens", [short(found["tokens"]) for found in costs]),
        ("epochs", [fixed(found["epochs"], 2) for found in costs]),
        (f"more than {OFTEN:g} epochs from minute", [fixed(found["often_from_minute"], 1) if found["often_from_minute"] else ""
                                                     for found in costs]),
        ("tokens/s", [short(found["tokens_per_second"]) for found in costs]),
        ("memory", [size(found["memory"]) for found in costs]), ("parameters", [short(found["parameters"]) for found in costs])]
    return grid([(name, cells) for name, cells in columns if any(cells)])


def references(rows: list[Row]) -> str:
    """What counting reaches, where all runs were scored on the same tokens."""
    found = [row.run.ngrams for row in rows if row.run.ngrams]
    if not found or any(other != found[0] for other in found):
        return ""
    return "Counting alone, on the same tokens: " + ", ".join(f"{name} {value:.3f}" for name, value in found[0].items()) + ".\n"


def grid(columns: list[tuple[str, list[str]]]) -> str:
    """A Markdown table; a bar in a cell would end it."""
    head = "| " + " | ".join(name for name, _ in columns) + " |"
    rule = "|---|" + "---:|" * (len(columns) - 1)
    lines = ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
             for cells in zip(*(cells for _, cells in columns), strict=True)]
    return "\n".join([head, rule, *lines]) + "\n"


def _rate(row: Row) -> str:
    """The learning rate; one at the end of those that were tried says so, since a better one may lie beyond."""
    rate, tried = row.entry.config.train.lr, row.entry.rates
    end = {max(tried): " (highest tried)", min(tried): " (lowest tried)"}.get(rate, "") if tried else ""
    return f"{rate:g}{end}"


def _word(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
