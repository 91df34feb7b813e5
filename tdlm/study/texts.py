"""Studies of generated text: how steps are shared between the levels, sheets of samples, a picture of one text's way down.

They need one trained run and take yours (`--finished RUN`), else they train one. Seeds are fixed and no sample is left out.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import write_json
from ..model.head import Tied
from ..objectives.ar import Autoregressive
from ..objectives.tree import TreeMethod
from ..recipes import BASE
from ..report.text import fixed, plus_minus
from ..verbs.sample import Request
from .collect import Collection, Row, grid
from .entry import Entry, Size, Study
from .reading import Reading
from .settings import BUDGET, TOY, minutes_of, told
from .trace import way_down

COUNT: dict[Size, int] = {"toy": 4, "budget": 64, "full": 256}
"""Samples that a generative perplexity is taken from."""
STEPS: dict[Size, int] = {"toy": 32, "budget": 512, "full": 512}
SHARES = range(1, 8)
"""Eighths of the steps that the upper level gets: 64, 128, ..., 448 of 512."""
SHEET: dict[Size, tuple[tuple[int, ...], int]] = {"toy": ((32, 64), 2), "budget": ((512, 1024), 4), "full": ((512, 1024), 4)}
"""Steps, and samples on a sheet."""


def _one(size: Size) -> list[Entry]:
    """One run of the tree method; the paper's BASE at full size."""
    if size == "full":
        return [Entry("tdlm-base", replace(BASE, name="tdlm-base"), {"branching": 512})]
    base, options = (TOY, {"branching": 17, "height": 2}) if size == "toy" else (BUDGET, {"branching": 512})
    config = replace(base, name=f"{size}-tdlm", method=TreeMethod(head=Tied()), backbone=told(base, "level"))
    return [Entry("tdlm", config, options, minutes_of(size))]


def _one_and_judge(size: Size) -> list[Entry]:
    if size != "toy":
        return _one(size)
    reader = replace(TOY, name="toy-judge", method=Autoregressive(), backbone=told(TOY, "causal"))
    return [*_one(size), Entry("judge", reader)]


def _written(found: Collection) -> list[Row]:
    """The runs that are studied: all that do not read from left to right."""
    return [row for row in found.rows if not row.entry.config.method.causal]


def step_allocation(found: Collection) -> dict[str, Any]:
    reading, total, parts, kept = Reading(found), STEPS[found.size], ["## Steps by level"], {}
    for row in _written(found):
        if row.run.tree_shape is None or not row.run.tree_shape.endswith("H=2"):
            raise ConfigError(f"{row.name} has the tree {row.run.tree_shape}; steps are shared between two levels, so this study "
                              "needs a run on a tree of height 2")
        splits = [(total * share // 8, total - total * share // 8) for share in SHARES]
        read = [reading.quality(row, Request(count=COUNT[found.size], per_level=split, batch=16)) for split in splits]
        kept[row.name] = {"/".join(map(str, split)): result for split, result in zip(splits, read)}
        named = [(" / ".join(map(str, split)), result["samples"], f"{result['settings']['evaluations']:.0f}")
                 for split, result in zip(splits, read)]
        parts += ["", f"### {row.name}", "", _quality_table("steps, top / bottom level", named, read[0])]
    return {"markdown": "\n".join(parts) + "\n", "quality": kept}


def generated(found: Collection) -> dict[str, Any]:
    """Generative perplexity of every run, kept in the run folders too, where reports and comparisons find it."""
    reading, named, read = Reading(found), [], {}
    for row in found.rows:
        request = Request(count=COUNT[found.size], steps=row.entry.config.data.length, batch=16)
        read[row.name] = result = reading.quality(row, request)
        write_json(Path(row.run.folder) / "quality.json", result)
        named.append((row.name, result["samples"], f"{result['settings']['evaluations']:.0f}"))
    if not read:
        return {}
    text = _quality_table("run", named, next(iter(read.values())))
    return {"markdown": f"## Generated text\n\n{text}\n", "quality": read}


def _quality_table(first: str, named: list[tuple[str, dict[str, Any], str]], result: dict[str, Any]) -> str:
    named = [*named, ("human text", result["human"], "")]
    texts = [texts for _, texts, _ in named]
    columns = [(first, [name for name, _, _ in named]),
               ("gen. perplexity", [fixed(found["perplexity"], 1) for found in texts]),
               ("nats per judge token", [plus_minus(found["nats"], found["error"]) for found in texts]),
               ("entropy, nats", [fixed(found["entropy"], 3) for found in texts]),
               ("distinct-2", [fixed(found["distinct"]["2"], 3) for found in texts]),
               ("texts", [str(found["count"]) for found in texts]),
               ("evaluations", [count for _, _, count in named])]
    drawn = result["settings"]
    return (f"{grid(columns)}\nJudge {result['judge']['name']}, at most {result['max_length']} of its tokens a text; seed "
            f"{drawn['seed']}, temperature {drawn['temperature']:g}; errors are standard errors over texts.")


def sample_sheets(found: Collection) -> dict[str, Any]:
    """Uncurated samples, the first ones of seed 0, whole."""
    reading, (steps, count), parts = Reading(found), SHEET[found.size], []
    for row in _written(found):
        for number in steps:
            drawn = reading.draw(row, Request(count=count, steps=number, batch=16))
            parts += [f"## {row.name}, {number} steps", "", f"{drawn['evaluations']['mean']:.0f} network evaluations a "
                      f"sample, {drawn['settings']['length']} tokens, seed 0, temperature 1. None was left out."]
            for place, sample in enumerate(drawn["samples"]):
                fence = _fence(sample["text"])
                parts += ["", f"Sample {place}:", "", f"{fence}text", sample["text"], fence]
            parts.append("")
    return {"markdown": "\n".join(parts)}


def _fence(text: str) -> str:
    """Longer than any run of backticks in a text, which therefore cannot end the block."""
    longest = run = 0
    for letter in text:
        run = run + 1 if letter == "`" else 0
        longest = max(longest, run)
    return "`" * max(3, longest + 1)


def picture(found: Collection) -> dict[str, Any]:
    """The tree as a map, and one text on its way from the root to its tokens."""
    parts = []
    for row in _written(found):
        tree, trace = way_down(row, found, STEPS[found.size])
        parts += [f"## {row.name}", "", f"![the tree]({tree.name})", "", f"![from coarse to fine]({trace.name})", ""]
    return {"markdown": "\n".join(parts)}


FINISHED = "a finished run if there is one (--finished RUN); else it trains its own"


def _study(name: str, about: str, entries: Callable[[Size], list[Entry]], outcome: Callable[[Collection], dict[str, Any]],
           more: str = "", judged: bool = False) -> Study:
    return Study(name, about, entries, outcome, needs=FINISHED + more, judged=judged)


STEP_ALLOCATION = _study(
    "step-allocation", "Seven ways to share the sampler's steps between two levels, read by a judge.", _one_and_judge,
    step_allocation, "; a judge (pip install 'tdlm[hf]'; at toy size the study trains one)", judged=True)
SAMPLE_SHEETS = _study("sample-sheets", "Samples as they come, at two numbers of steps, from fixed seeds.", _one, sample_sheets)
PICTURE = _study("picture", "The tree as a map, and how one text is made from coarse to fine.", _one, picture)
