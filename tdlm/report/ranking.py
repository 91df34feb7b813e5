"""Many runs as plain data: one entry a run, sorted by bound within each group that was measured alike.

The lowest bound of a group is marked `best`. An entry whose distance from it is below two standard errors of the difference
(Monte-Carlo errors of both) is marked `near`: these numbers do not tell the two apart. Left-to-right models with an exact
likelihood stand beside bounds: -log p itself on one side, an upper bound of it on the other. What is no bound cannot be
best where there are bounds.
"""
from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from .protocol import differing, groups
from .read import NGRAMS, Run, mapping, number, numbers

CLOSE = 2.0
"""Standard errors of the difference."""
_DRAWN = ("length", "steps", "per_level", "times", "sampler", "temperature", "top_p", "min_p")
"""Settings of the sampler that two generative perplexities must share."""


@dataclass(frozen=True)
class Entry:
    """What the comparison says of one run. `place` is its number among all runs, which gives its colour."""

    place: int
    name: str
    facts: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]


@dataclass(frozen=True)
class Section:
    """Runs measured alike, best first, and the models that only count, on the same tokens."""

    protocol: dict[str, str]
    entries: list[Entry]
    references: list[dict[str, Any]]
    human: dict[str, Any] | None
    """Held-out human text, judged like the samples."""
    notes: list[str]


def rank(runs: list[Run]) -> list[Section]:
    names, places = _names(runs), {id(run): place for place, run in enumerate(runs)}
    sections = []
    for group in groups(runs):
        entries = [Entry(places[id(run)], names[places[id(run)]], facts_of(run)) for run in group.runs]
        entries.sort(key=lambda entry: (entry["bound"] is None, entry["bound"], entry.place))
        _mark(entries)
        sections.append(Section(group.protocol, entries, _references(group.runs), _human(group.runs),
                                _notes(entries, group.runs)))
    return sections


def facts_of(run: Run) -> dict[str, Any]:
    """Everything the tables show, as JSON data; None where a run does not say."""
    head, method = run.headline or {}, mapping(run.setting("method"))
    parameters, bound = mapping(run.provenance.get("parameters")), number(head.get("bound"))
    speeds = [value for line in run.train if (value := number(line.get("tokens_per_second"))) is not None]
    memory = [value for line in run.train if (value := number(line.get("memory"))) is not None]
    perplexity = number(head.get("perplexity"))
    return {
        "method": _kind(method), "process": _kind(method.get("process")), "head": _kind(method.get("head")),
        "tree": run.tree_shape, "backbone": _backbone(mapping(run.setting("backbone"))),
        "starts_from": mapping(run.provenance.get("warm_start")).get("from"),
        "imported_from": mapping(run.provenance.get("imported")).get("from"),
        "step": _count(head.get("step")), "bound": bound, "error": number(head.get("error")), "kind": _what(head),
        "estimator": head.get("estimator"), "mark": "",
        "perplexity": perplexity if perplexity is not None or bound is None or bound > 700 else math.exp(bound),
        "bits_per_byte": number(head.get("bits_per_byte")), "levels": numbers(head.get("levels")),
        **_measures(mapping(run.quality.get("samples")) or run.quality), "mauve": number(run.quality.get("mauve")),
        "evaluations": number(mapping(run.quality.get("settings")).get("evaluations")), "judge": judge_name(run.quality),
        "parameters": _count(parameters.get("total")), "parameters_blocks": _count(parameters.get("blocks")),
        "parameters_head": _count(parameters.get("head")),
        "tokens_seen": _count(run.train[-1].get("tokens")) if run.train else None,
        "tokens_per_second": statistics.median(speeds) if speeds else None, "memory": _count(max(memory, default=None)),
        "device": run.provenance.get("device"),
    }


def is_bound(head: dict[str, Any]) -> bool:
    return head.get("pad") != "drop" and head.get("is_a_bound") is not False


def _what(head: dict[str, Any]) -> str:
    if not is_bound(head):
        return "not a bound"
    return "exact" if head.get("estimator") == "exact" else "bound"


def _count(value: Any) -> int | None:
    found = number(value)
    return None if found is None else round(found)


def _kind(part: Any) -> str | None:
    kind = mapping(part).get("kind")
    return kind if isinstance(kind, str) else None


def _backbone(part: dict[str, Any]) -> str | None:
    if number(part.get("blocks")) is None or number(part.get("width")) is None:
        return None
    told = part.get("style") or part.get("conditioning")
    return f"{part['blocks']} x {part['width']}" + (f", {told}" if told else "")


def _measures(texts: dict[str, Any]) -> dict[str, float | None]:
    """What was measured on some texts (`evaluate/quality.py`)."""
    return {"generative_perplexity": number(texts.get("perplexity")), "entropy": number(texts.get("entropy")),
            "distinct_2": number(mapping(texts.get("distinct")).get("2"))}


def judge_name(quality: dict[str, Any]) -> str | None:
    judge = quality.get("judge")
    name = judge.get("name") if isinstance(judge, dict) else judge
    return name if isinstance(name, str) else None


def _judging(quality: dict[str, Any]) -> dict[str, str]:
    """What two generative perplexities must agree in."""
    drawn = mapping(quality.get("settings"))
    return {"judge": str(judge_name(quality)), "most tokens": str(quality.get("max_length")),
            "samples": str(mapping(quality.get("samples")).get("count")), **{name: str(drawn.get(name)) for name in _DRAWN}}


def _human(runs: list[Run]) -> dict[str, Any] | None:
    """The measures of human text, where all runs that have them agree."""
    found = [_measures(human) for run in runs if (human := mapping(run.quality.get("human")))]
    return found[0] if found and all(other == found[0] for other in found) else None


def _names(runs: list[Run]) -> list[str]:
    """Folder names, with the folder above where two are the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{run.parent}/{name}" for name, run in zip(names, runs)]


def _mark(entries: list[Entry]) -> None:
    """Say which bound is the lowest and which are too near to it to tell."""
    ranked = [entry for entry in entries if entry["bound"] is not None]
    ranked = [entry for entry in ranked if entry["kind"] != "not a bound"] or ranked
    if len(ranked) < 2:
        return
    best = ranked[0]
    best.facts["mark"] = "best"
    for entry in ranked[1:]:
        if entry["bound"] - best["bound"] <= CLOSE * math.hypot(entry["error"] or 0.0, best["error"] or 0.0):
            entry.facts["mark"] = "near"


def _references(runs: list[Run]) -> list[dict[str, Any]]:
    """The n-gram models, where all runs that have them agree on them."""
    found = [run for run in runs if run.ngrams]
    rows = []
    for name in NGRAMS:
        values = [run.ngrams[name] for run in found if name in run.ngrams]
        if values and max(values) - min(values) < 1e-6:
            tokens, size = (number((found[0].eval or {}).get(key)) for key in ("tokens", "bytes"))
            bits = values[0] * tokens / size / math.log(2) if tokens and size else None
            rows.append({"name": name, "bound": values[0], "perplexity": math.exp(values[0]), "bits_per_byte": bits})
    return rows


def _notes(entries: list[Entry], runs: list[Run]) -> list[str]:
    """What a reader must know before comparing columns of this table."""
    notes = []
    if any(len(entry["levels"]) > 1 for entry in entries):
        many = any(len({entry[key] for entry in entries}) > 1 for key in ("process", "tree"))
        notes.append("Levels stand leaf first and add up to the bound." + (
            " Levels of different processes or trees cannot be compared with one another: only their sum can." if many else ""))
    kinds = {entry["kind"] for entry in entries if entry["bound"] is not None}
    if "exact" in kinds and len(kinds) > 1:
        notes.append("A left-to-right model's number (=) is -log p itself; the others are upper bounds of theirs "
                     "(\N{LESS-THAN OR EQUAL TO}), whose own -log p may be lower.")
    if "not a bound" in kinds:
        notes.append("PAD mode drop leaves PAD terms out although visible PADs give the length away: its numbers are not "
                     "bounds.")
    if any(entry["mark"] == "near" for entry in entries):
        notes.append("\N{ALMOST EQUAL TO}: not told apart from the best by these rows and repeats (within two Monte-Carlo "
                     "standard errors of the difference).")
    judged = [_judging(run.quality) for run in runs if run.quality]
    if judged and (points := differing(judged)):
        notes.append(f"Generative perplexities were measured differently ({', '.join(points)}) and cannot be compared.")
    if any(entry["generative_perplexity"] is not None for entry in entries):
        notes.append("A generative perplexity means little without the entropy beside it: repetition lowers both.")
    if len({entry["device"] for entry in entries if entry["tokens_per_second"]}) > 1:
        notes.append("Speeds and memory are from different devices.")
    missing = [name for name in NGRAMS if any(name in run.ngrams for run in runs)]
    if len(missing) > len(_references(runs)):
        notes.append("N-gram models on which the runs do not agree are left out.")
    return notes
