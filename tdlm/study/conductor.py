"""Conduct a study: data and trees once, then run after run - train, evaluate -, then tables, figures and the comparison.

Everything lies in one folder and is continued where it stopped. All runs see the same rows in the same order (the order depends
on the data's seed, not on the method). A run that fails is reported and the others go on; the same command tries it again. With
`--only` runs can be made one by one, also at the same time on several devices: what is written about all of them is made anew
from the run folders each time.

    OUT/data  OUT/trees/OPTIONS.safetensors  OUT/paces/HASH.json  OUT/runs/NAME  OUT/failed/NAME.txt  OUT/texts/NAME-STEPS.json
    OUT/STUDY.md  OUT/STUDY*.svg  OUT/compare.{html,md,csv,json,svg,png}  OUT/study.json
"""
from __future__ import annotations

import fnmatch
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..data.prepare import prepare
from ..data.store import TokenStore
from ..device import choose_device
from ..errors import ConfigError
from ..files import write_json, write_text
from ..report import compare_runs
from ..train import folder as run_folder
from ..train.metrics import Progress, read_metrics
from ..train.provenance import provenance
from .collect import Collection, Row, cost, references, row_of, table, training_seconds
from .engine import TREES, Engine, Say, last_bound
from .entry import Entry, Size, Study, Wishes
from .figures import costs_figure
from .predict import summary


def conduct(study: Study, out: Path, *, size: Size = "toy", data: Path | None = None, only: Sequence[str] = (),
            device: str | None = None, say: Say, command: str | None = None, progress: Callable[[], Progress] | None = None,
            wishes: Wishes = Wishes(), finished: Sequence[Path] = (), trees_only: bool = False,  # noqa: B008 - frozen
            within: float | None = None) -> dict[str, Any]:
    """Do what is left of a study; returns what every run scored, beside n-gram models on the same tokens.

    `finished` are runs to study instead of the study's own; `trees_only` prepares data and trees and trains nothing; no run is
    begun that would not be done `within` so many minutes.
    """
    until = None if within is None else time.monotonic() + 60 * within
    for name, what in (("config.json", "a run"), ("manifest.json", "prepared data")):
        if (out / name).exists():
            raise ConfigError(f"{out} is the folder of {what}; choose another --out for the study")
    entries = study.runs(size, wishes)
    chosen = chosen_runs(entries, only)
    if finished:
        if only or trees_only:
            raise ConfigError("--finished brings runs that are trained already; leave out --only and --trees-only")
        entries, chosen = [], []
    brought = [_brought(path) for path in finished]
    if chosen and data is None and size != "toy":
        raise ConfigError(f"the {size} study needs --data DIR: prepare your corpus with tdlm prepare")
    place = str(choose_device(device))
    if chosen:
        data = _novels(out / "data", study.tokenizer, say) if data is None else data
        say(summary(chosen, size, TokenStore(data).size))
    engine, late = Engine(size, out, data, entries, place, say, command, progress, until), []
    for number, entry in enumerate(chosen, 1):
        if trees_only or engine.has_time(entry):
            engine.attempt(entry, f"{number}/{len(chosen)} ", trees_only)
        else:
            late.append(entry.name)
    if late:
        say(f"no time was left for {', '.join(late)}")
    result = {"study": study.name, "size": size, "scores": engine.scores, "failed": engine.failed, "late": late, "files": {},
              "differences": [], "provenance": provenance(place, command=command)}
    if trees_only:
        result["trees"] = sorted(path.name for path in (out / TREES).glob("*.safetensors"))
    else:
        result |= _collected(study, engine, brought, wishes, all_asked=not only)
    write_json(out / "study.json", result)
    return result


def _collected(study: Study, engine: Engine, brought: list[Row], wishes: Wishes, *, all_asked: bool) -> dict[str, Any]:
    """Tables, figures and the comparison of all runs that are finished; what is the study's own once none is missing, or when
    all were asked for."""
    finals = [entry for entry in engine.entries if entry.trial_of is None]
    trials = _trials(engine)
    own = [row for entry in finals if (row := _finished(engine, entry, trials)) is not None]
    missing = [entry.name for entry in finals if entry.name not in {row.name for row in own}]
    if missing:
        engine.say(f"not finished: {', '.join(missing)}; the same command goes on with them")
    found = Collection(study, engine.size, engine.out, [*brought, *own], wishes, engine.device, engine.say)
    outcome: dict[str, Any] = {}
    if study.outcome is not None and (all_asked or not missing):
        try:
            outcome = dict(study.outcome(found))
            engine.succeed("outcome")
        except Exception as error:
            engine.fail("outcome", error)
    _page(found, outcome.pop("markdown", ""))
    nothing: dict[str, Any] = {"files": {}, "differences": []}
    compared = compare_runs([row.run.folder for row in found.rows], engine.out) if found.rows else nothing
    return {"missing": missing, "runs": {row.name: {**cost(row), **row.entry.facts} for row in found.rows}, "trials": trials,
            "table": str(found.file(".md")), "outcome": outcome, "files": compared["files"],
            "differences": compared["differences"]}


def _page(found: Collection, own: str) -> None:
    """The study's own table and figures as Markdown."""
    parts = [f"# Study {found.study.name} ({found.size})", "", found.study.about, ""]
    if found.rows:
        parts += [table(found.rows), references(found.rows)]
        if (path := costs_figure(found.file("-cost.svg"), found.rows)) is not None:
            parts += [f"![bound against minutes, tokens and memory]({path.name})", ""]
    write_text(found.file(".md"), "\n".join([*parts, own]).rstrip("\n") + "\n")


def _finished(engine: Engine, entry: Entry, trials: dict[str, dict[str, Any]]) -> Row | None:
    """A run that is trained and evaluated, with the configuration it really had."""
    if engine.reached(entry) is None:
        return None
    where = engine.folder(entry)
    config = run_folder.read_config(where)
    spent = sum(found["minutes"] for found in trials.values() if found["of"] == entry.name)
    return row_of(replace(entry, config=config), where, spent)


def _trials(engine: Engine) -> dict[str, dict[str, Any]]:
    """What was spent on finding learning rates, and what every rate reached."""
    found = {}
    for entry in engine.entries:
        lines = read_metrics(engine.folder(entry) / run_folder.METRICS) if entry.trial_of else []
        if seconds := training_seconds([line for line in lines if line["kind"] == "train"]):
            found[entry.name] = {"of": entry.trial_of, "lr": entry.config.train.lr, "minutes": seconds[-1][1] / 60,
                                 "bound": last_bound(engine.folder(entry))}
    return found


def _brought(path: Path) -> Row:
    """A run that the user brings; its own folder says what it is."""
    config = run_folder.read_config(path)
    return row_of(Entry(path.resolve().name, config), path)


def chosen_runs(entries: Sequence[Entry], only: Sequence[str]) -> list[Entry]:
    """In the order of `only`, whose names may be patterns (`mdlm*`)."""
    known = {entry.name: entry for entry in entries}
    found = {name: fnmatch.filter(known, name) for name in only}
    if strange := [name for name, names in found.items() if not names]:
        raise ConfigError(f"this study has no run {strange[0]!r}; it has {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(itertools.chain.from_iterable(found.values()))] if only else list(entries)


def _novels(folder: Path, tokenizer: str, say: Say) -> Path:
    say("data: the three novels that come with the package")
    assets = resources.files("tdlm") / "assets"
    with (resources.as_file(assets / "novels.train.jsonl.xz") as text,
          resources.as_file(assets / "novels.valid.jsonl.xz") as held):
        prepare([text], folder, tokenizer=tokenizer, valid_inputs=[held])
    return folder
