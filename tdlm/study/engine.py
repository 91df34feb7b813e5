"""Conduct a study: data and trees once, then run after run - train, evaluate -, then the comparison.

Everything lies in one folder and is continued where it stopped: a finished run is not trained again, an evaluated one not
evaluated again. All runs see the same rows in the same order (the order depends on the data's seed, not on the method).

    OUT/data  OUT/trees/NAME.safetensors  OUT/runs/NAME  OUT/compare.{html,md,csv,json,svg,png}  OUT/study.json
"""
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..data.prepare import prepare
from ..errors import ConfigError
from ..files import write_json
from ..report import compare_runs
from ..train.loop import train
from ..train.metrics import Progress
from ..train.provenance import provenance
from ..train.run import open_run
from ..verbs.evaluate import evaluate_run
from ..verbs.tree import build_from
from .entry import Entry, Size, Study


def conduct(study: Study, out: Path, *, size: Size = "toy", data: Path | None = None, only: Sequence[str] = (),
            device: str | None = None, say: Callable[[str], None], command: str | None = None,
            progress: Callable[[], Progress] | None = None) -> dict[str, Any]:
    """Do what is left of a study; returns what every run scored, beside n-gram models on the same tokens."""
    entries = _chosen(study.entries(size), only)
    if data is None:
        if size != "toy":
            raise ConfigError(f"the {size} study needs --data DIR: prepare your corpus with tdlm prepare")
        data = _novels(out / "data", study.tokenizer, say)
    trees = {name: _tree(out / "trees" / f"{name}.safetensors", options, data, say)
             for name, options in study.trees.get(size, {}).items() if any(entry.tree == name for entry in entries)}
    scores, folders = {}, []
    for number, entry in enumerate(entries, 1):
        folder = out / "runs" / entry.name
        say(f"{number}/{len(entries)} {entry.name}: {entry.config.train.steps:,} steps of {entry.config.method.kind}")
        train(entry.config, data=data, tree=None if entry.tree is None else trees[entry.tree], out=folder, device=device,
              command=command, progress=None if progress is None else progress())
        scores[entry.name] = score = _evaluated(folder, data, device or "cpu")
        folders.append(folder)
        say(f"    {score['bound']:.3f} nats/token (unigram {score['ngrams']['unigram']:.3f})")
    compared = compare_runs(folders, out)
    result = {"study": study.name, "size": size, "scores": scores, "files": compared["files"],
              "differences": compared["differences"], "provenance": provenance(device or "cpu", command=command)}
    write_json(out / "study.json", result)
    return result


def _chosen(entries: list[Entry], only: Sequence[str]) -> list[Entry]:
    known = [entry.name for entry in entries]
    if strange := [name for name in only if name not in known]:
        raise ConfigError(f"this study has no run {strange[0]!r}; it has {', '.join(known)}")
    return [entry for entry in entries if not only or entry.name in only]


def _novels(folder: Path, tokenizer: str, say: Callable[[str], None]) -> Path:
    say("data: the three novels that come with the package")
    assets = resources.files("tdlm") / "assets"
    with (resources.as_file(assets / "novels.train.jsonl.xz") as text,
          resources.as_file(assets / "novels.valid.jsonl.xz") as held):
        prepare([text], folder, tokenizer=tokenizer, valid_inputs=[held])
    return folder


def _tree(path: Path, options: dict[str, Any], data: Path, say: Callable[[str], None]) -> Path:
    if not path.is_file():
        say(f"tree {path.stem}: {', '.join(f'{name}={value}' for name, value in options.items())}")
        path.parent.mkdir(parents=True, exist_ok=True)
        tree, _ = build_from(data=data, say=lambda line: None, **options)
        tree.save(path)
    return path


def _evaluated(folder: Path, data: Path, device: str) -> dict[str, Any]:
    """The run's eval.json, made if it is missing or of other weights."""
    run = open_run(folder, device)
    kept = folder / "eval.json"
    if kept.is_file():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found.get("step") == run.step:
            return found
    return evaluate_run(run, data=data, split="valid", estimator="auto", pad=None, repeats=4, limit=None, batch=32, seed=0,
                        say=lambda line: None)
