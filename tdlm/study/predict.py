"""What a study will cost, before it starts: `tdlm study --list`. Counted on the real networks as in `tdlm train --dry-run`.

Hours are those of the named chip at 40% of its bf16 peak; measure your own and scale. A run that is bounded by minutes takes
these minutes anywhere and sees as many tokens as the machine can show it; evaluation, compilation and judging come on top. A
toy run is predicted for one CPU core from a rate that such small networks were seen to reach.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..registry import from_json, to_json
from ..train.metrics import CHIPS
from ..train.plan import ASSUMED_MFU, complete_tree, meta_model, train_flops
from ..tree.tree import Tree
from .entry import Entry, Size, Study, Wishes

SHOWN = ("H200", "A100", "RTX 3090")
CORE = 1.8e10
"""FLOP/s of one CPU core with networks of this size (docs/studies.md)."""
VOCABULARY = 50_258


def predict(study: Study, size: Size, wishes: Wishes = Wishes(), vocabulary: int | None = None) -> dict[str, Any]:  # noqa: B008
    """Runs, tokens and hours of a study as plain data."""
    entries = study.runs(size, wishes)
    return {"study": study.name, "about": study.about, "needs": study.needs, "size": size,
            **totals(entries, size, vocabulary), "summary": summary(entries, size, vocabulary)}


def totals(entries: Sequence[Entry], size: Size, vocabulary: int | None = None) -> dict[str, Any]:
    runs = {entry.name: run_cost(entry, size, vocabulary) for entry in entries}
    minutes = sum(run["minutes"] or 0.0 for run in runs.values())
    names = ("core",) if size == "toy" else SHOWN
    hours = {name: sum(run["hours"][name] for run in runs.values()) for name in names}
    return {"runs": runs, "count": len(runs), "trials": sum(entry.trial_of is not None for entry in entries), "minutes": minutes,
            "hours": hours, "tokens": {name: sum(run["tokens"][name] for run in runs.values()) for name in names}}


def run_cost(entry: Entry, size: Size, vocabulary: int | None = None) -> dict[str, Any]:
    config = entry.config
    known = vocabulary or (258 if size == "toy" else VOCABULARY)
    shape = {"backbone": config.backbone, "method": config.method, "data": config.data}
    flops = _flops(json.dumps({name: to_json(part) for name, part in shape.items()}, sort_keys=True), known,
                   None if entry.tree is None else int(entry.tree.get("branching", 512)))
    speeds = {"core": CORE / flops} if size == "toy" else {
        name: ASSUMED_MFU * peak * 1e12 / flops for name, peak, _ in CHIPS if name in SHOWN}
    positions = config.train.steps * config.train.batch * config.data.length
    minutes = entry.minutes
    return {"minutes": minutes, "flops_per_token": flops,
            "tokens": {name: positions if minutes is None else round(60 * minutes * speed) for name, speed in speeds.items()},
            "hours": {name: positions / speed / 3600 if minutes is None else minutes / 60 for name, speed in speeds.items()}}


@lru_cache(maxsize=512)
def _flops(shape: str, vocabulary: int, branching: int | None) -> int:
    """FLOPs of a training step per token; depends on the network and the tree's sizes alone."""
    from ..config import BackboneConfig, DataConfig, RunConfig

    part = json.loads(shape)
    config = RunConfig("cost", from_json(Any, part["method"]), from_json(DataConfig, part["data"]),
                       from_json(BackboneConfig, part["backbone"]))
    tree = _tree(vocabulary, branching)
    return int(train_flops(meta_model(config, tree), config, tree.height)["train"])


@lru_cache(maxsize=32)
def _tree(vocabulary: int, branching: int | None) -> Tree:
    return Tree.star(vocabulary) if branching is None else complete_tree(vocabulary, branching)


def summary(entries: Sequence[Entry], size: Size, vocabulary: int | None = None) -> str:
    """One line: how many runs, how long."""
    found = totals(entries, size, vocabulary)
    runs = f"{found['count']} run{'s' if found['count'] != 1 else ''}"
    if found["trials"]:
        runs += f" ({found['trials']} of them short, to find learning rates)"
    if not found["count"]:
        return "nothing is trained"
    if all(run["minutes"] is not None for run in found["runs"].values()):
        return f"{runs}, {duration(found['minutes'] / 60)} of training on any machine"
    if size == "toy":
        return f"{runs}, about {duration(found['hours']['core'])} of training on one CPU core"
    times = ", ".join(f"{name} {duration(found['hours'][name])}" for name in SHOWN)
    most = max(found["tokens"].values())
    return f"{runs}, {most / 1e9:.1f}B token positions: {times} (one chip at {100 * ASSUMED_MFU:.0f}% of its peak)"


def duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:,.0f} days"
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{60 * hours:.0f} minutes" if hours >= 1 / 40 else f"{3600 * hours:.0f} seconds"


def described(found: dict[str, Any], *, every: bool) -> list[str]:
    """Lines for a person: the study, and with `every` all its runs."""
    lines = [found["study"], f"    {found['about']}", f"    {found['size']}: {found['summary']}"]
    if found["needs"]:
        lines.append(f"    needs {found['needs']}")
    if every:
        for name, run in found["runs"].items():
            where, hours = next(iter(run["hours"].items()))
            chip = "" if run["minutes"] or where == "core" else f" on {where}"
            tokens = f"{run['tokens'][where] / 1e6:,.1f}M token positions"
            lines.append(f"    --only {name:28s} {duration(hours):>12s}{chip}, {tokens}")
    return lines
